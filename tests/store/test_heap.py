from __future__ import annotations

import subprocess
import sys

import pytest

from datagen_ray.store import heap

PROGRAM = """
import os
import sys
from datagen_ray.store.heap import return_free_memory, return_large_blocks

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = (ctypes.c_void_p,)

def blocks(size, count):
    made = [libc.malloc(size) for _ in range(count)]
    for each in made:
        ctypes.memset(each, 1, size)
    return made

return_large_blocks()
before = resident()
# freeing this one would raise glibc's limit above the size of the next
libc.free(blocks(16 << 20, 1)[0])
held = blocks(4 << 20, 16)
keeps_the_heap = blocks(64, 1)
for each in held:
    libc.free(each)
after_large = resident() - before
small = blocks(32 << 10, 1024)
for each in small[:-1]:
    libc.free(each)
return_free_memory()
print(after_large, resident() - before)
"""


@pytest.mark.skipif(heap._glibc() is None, reason="only glibc keeps freed memory like this")
def test_freed_memory_goes_back_to_the_system():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    after_large, after_small = map(int, done.stdout.split())
    assert after_large < 16 << 20
    assert after_small < 16 << 20


def test_a_limit_that_the_environment_sets_is_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000000")
    assert heap._set_by_environment()
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1000000")
    assert heap._set_by_environment()
    monkeypatch.delenv("GLIBC_TUNABLES")
    assert not heap._set_by_environment()


def test_without_glibc_nothing_is_done(monkeypatch):
    monkeypatch.setattr(heap, "_glibc", lambda: None)
    heap.return_large_blocks()
    heap.return_free_memory()
