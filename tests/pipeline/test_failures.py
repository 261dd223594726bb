"""Failures, retries, policies, exhaustion."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest

from datagen_ray.errors import PipelineError, StorageError, WriterFencedError
from datagen_ray.log.events import DatagenEventType
from datagen_ray.pipeline import codecs
from datagen_ray.pipeline.failures import MAX_MESSAGE_CHARS, redact_secrets, redacted
from datagen_ray.pipeline.nodes import Branch, Conditional, Loop, MapReduce, Router, Sequence
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.results import Append, Filtered, Permanent
from datagen_ray.pipeline.retry import MAX_ASKED_WAIT_S, Retry, asked_wait_s
from datagen_ray.pipeline.steps import step
from tests.pipeline.support import ListLog, ListSink, rerun, rows, run, run_once

NO_WAIT = 0.0


@step
def ok(item: Any) -> dict[str, Any]:
    return {"ok": 1}


@step
def bad(item: Any) -> None:
    raise ValueError("no luck, api_key=abcdef123456")


def failed(log: ListLog) -> list[Any]:
    return [e for e in log.events if e.event_type is DatagenEventType.FAILED]


def test_a_failed_row_tells_type_message_and_traceback_without_secrets() -> None:
    result, log = run(Pipeline("p", [ok, bad]))
    assert (result.status, result.failures) == ("failed", 1)
    assert result.error == "ValueError: no luck, api_key=[redacted]"
    (row,) = failed(log)
    assert str(row.position) == "bad[1] (leaf in p)"
    assert row.error_type == "ValueError"
    assert "test_failures.py" in row.traceback
    assert "abcdef123456" not in row.traceback + row.error_dump
    assert "executor.py" not in row.traceback
    assert str(log.folded().status) == "running"


def test_running_a_failed_root_again_resumes_it() -> None:
    broken = [True]

    @step
    def flaky(item: Any, ctx: Any) -> dict[str, Any]:
        if broken.pop() if broken else False:
            raise OSError("down")
        return {"attempt": ctx.attempt}

    pipeline = Pipeline("p", [ok, flaky])
    result, log = run(pipeline)
    assert result.status == "failed"
    again = rerun(pipeline, log)
    assert (again.status, again.steps_executed) == ("completed", 1)
    assert log.fields()["attempt"] == 1


@pytest.mark.parametrize(
    ("node", "position"),
    [
        (Conditional("c", when=lambda item: 1 / 0, then=ok), "c[0] (conditional in p)"),
        (Router("r", key=lambda item: 1 / 0, routes={1: ok}), "r[0] (router in p)"),
        (Router("r", key=lambda item: "?", routes={1: ok}), "r[0] (router in p)"),
        (Router("r", key=lambda item: [], routes={1: ok}), "r[0] (router in p)"),
        (Loop("l", ok, until=lambda item: 1 / 0, max_rounds=2), "l[0] (loop in p)"),
        (
            MapReduce("m", split=lambda item: 1 / 0, each=ok, reduce=lambda r: None),
            "m[0] (map_reduce in p)",
        ),
        (
            MapReduce("m", split=lambda item: 5, each=ok, reduce=lambda r: None),
            "m[0] (map_reduce in p)",
        ),
        (
            MapReduce("m", split=lambda item: [1], each=ok, reduce=lambda r: None),
            "m[0] (map_reduce in p)",
        ),
        (
            MapReduce("m", split=lambda item: [{}], each=ok, reduce=lambda r: 1 / 0),
            "m[0] (map_reduce in p)",
        ),
        (Branch("b", {"x": ok}, reduce=lambda r: ["no"]), "b[0] (branch in p)"),
    ],
)
def test_what_raises_fails_at_its_own_position(node: Any, position: str) -> None:
    result, log = run(Pipeline("p", [node]))
    assert result.status == "failed"
    assert [str(row.position) for row in failed(log)] == [position]


def test_siblings_of_a_failed_sub_item_finish_first() -> None:
    @step
    def each(item: Any) -> None:
        if item["i"] == 0:
            raise ValueError("first")

    fan = MapReduce(
        "m", split=lambda item: [{"i": i} for i in range(3)], each=each, reduce=lambda r: None
    )
    result, log = run(Pipeline("p", [fan]))
    assert result.error == "ValueError: first"
    assert [row.item_id for row in failed(log)] == ["5/m:0"]
    assert [str(log.folded(f"5/m:{i}").status) for i in range(3)] == [
        "running",
        "completed",
        "completed",
    ]


@pytest.mark.parametrize(("policy", "ended"), [("drop", "filtered"), ("keep", "completed")])
def test_a_failure_that_is_borne_ends_the_sub_item_in_one_append(policy: Any, ended: str) -> None:
    seen: list[Any] = []

    def reduce(item: Any, results: Any) -> dict[str, Any]:
        seen.extend((r.status, r.dropped, r.ok, r.reason, dict(r)) for r in results)
        return {"n": len(results)}

    fan = MapReduce(
        "m", split=lambda item: [{}], each=Sequence("s", [ok, bad]), reduce=reduce,
        on_failure=policy,
    )  # fmt: skip
    result, log = run(Pipeline("p", [fan]))
    assert result.status == "completed"
    batch = next(b for b in log.batches if b[0].event_type is DatagenEventType.FAILED)
    assert [str(event.event_type) for event in batch] == ["FAILED", "TERMINAL"]
    assert str(batch[1].status) == ended
    assert batch[1].error_type == "ValueError"
    reason = "no luck, api_key=[redacted]"
    assert seen == [("failed", policy == "drop", False, reason, {"ok": 1})]


def test_an_exception_that_only_shares_the_name_is_no_filter() -> None:
    other = type("Filtered", (Exception,), {})

    @step
    def each(item: Any) -> None:
        raise other("x")

    seen: list[str] = []
    fan = MapReduce(
        "m", split=lambda item: [{}], each=each,
        reduce=lambda item, results: seen.append(results[0].status), on_failure="drop",
    )  # fmt: skip
    run(Pipeline("p", [fan]))
    assert seen == ["failed"]


def test_retry_calls_again_and_counts() -> None:
    calls: list[tuple[int, int]] = []

    @step(retry=Retry(attempts=3, on=ValueError, wait_s=NO_WAIT))
    async def flaky(item: Any, ctx: Any) -> None:
        calls.append((ctx.retry, ctx.seed))
        raise ValueError("still")

    result, log = run(Pipeline("p", [flaky]))
    assert [retry for retry, _ in calls] == [0, 1, 2]
    assert len({seed for _, seed in calls}) == 1
    assert result.steps_executed == 1
    assert failed(log)[0].error_dump == "still\nretries: 2"


@pytest.mark.parametrize("error", [Filtered("no"), Permanent("no"), KeyError("other type")])
def test_what_is_never_retried(error: Exception) -> None:
    calls: list[int] = []

    @step(retry=Retry(attempts=5, on=(ValueError, Permanent, Filtered), wait_s=NO_WAIT))
    def once(item: Any) -> None:
        calls.append(1)
        raise error

    run(Pipeline("p", [once]))
    assert calls == [1]


def test_wrong_results_are_not_retried() -> None:
    calls: list[int] = []

    @step(retry=Retry(attempts=5, wait_s=NO_WAIT))
    def wrong(item: Any) -> Any:
        calls.append(1)
        return 5

    result, _ = run(Pipeline("p", [wrong]))
    assert calls == [1]
    assert "returned a int; return a dict" in (result.error or "")


def test_retry_believes_the_service() -> None:
    class Busy(Exception):
        retry_after = 7

    class Response:
        headers = {"Retry-After": "9"}  # noqa: RUF012

    class Http(Exception):
        response = Response()

    policy = Retry(wait_s=1.0, jitter=0.0, max_wait_s=4.0)
    assert policy.wait_after(Busy(), 1, seed=3) == 7
    assert policy.wait_after(Http(), 1, seed=3) == 9
    assert [policy.wait_after(ValueError(), n, seed=3) for n in (1, 2, 3, 4)] == [1, 2, 4, 4]
    assert Retry().wait_after(None, 1, seed=5) == Retry().wait_after(None, 1, seed=5)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_timeout_fails_the_step(is_async: bool) -> None:
    release = threading.Event()

    @step(timeout_s=0.01)
    def blocking(item: Any) -> None:
        release.wait()

    @step(timeout_s=0.01)
    async def waiting(item: Any) -> None:
        await asyncio.Event().wait()

    try:
        result, _ = run(Pipeline("p", [waiting if is_async else blocking]))
    finally:
        release.set()
    assert result.error == "TimeoutError: no result within timeout_s=0.01"


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration("x"), asyncio.CancelledError()])
def test_what_would_end_more_than_the_step_is_a_failure(error: BaseException) -> None:
    @step
    def leave(item: Any) -> None:
        raise error

    result, log = run(Pipeline("p", [leave]))
    assert result.status == "failed"
    assert failed(log)[0].error_type == type(error).__name__


def test_an_exhausted_root_is_left_alone_until_asked_for() -> None:
    pipeline = Pipeline("p", [bad])
    _, log = run(pipeline)
    rerun(pipeline, log)
    before = len(log.events)
    result = rerun(pipeline, log, exhausted_after=2)
    assert (result.status, result.steps_executed) == ("failed", 0)
    assert result.error is not None
    assert result.error.startswith("exhausted: 2 failures in '5', the last at bad[0]")
    assert len(log.events) == before
    assert rerun(pipeline, log, exhausted_after=None).steps_executed == 1


def test_dropped_failures_do_not_exhaust() -> None:
    fan = MapReduce(
        "m", split=lambda item: [{}, {}], each=bad.named("b2"), reduce=lambda r: None,
        on_failure="drop",
    )  # fmt: skip
    pipeline = Pipeline("p", [fan, bad])
    _, log = run(pipeline)
    assert len(failed(log)) == 3
    assert rerun(pipeline, log, exhausted_after=2).failures == 1


def test_storage_errors_are_raised_and_never_recorded() -> None:
    log = ListLog()
    with pytest.raises(WriterFencedError):
        asyncio.run(run_once(Pipeline("p", [ok]), log, {}, sink=ListSink(log, limit=1)))
    assert not failed(log)


def test_a_queued_row_that_was_refused_is_noticed_before_the_next_step() -> None:
    calls: list[str] = []

    @step
    async def first(item: Any) -> None:
        calls.append("first")

    log = ListLog()
    with pytest.raises(WriterFencedError):
        asyncio.run(run_once(Pipeline("p", [first]), log, {}, sink=ListSink(log, limit=0)))
    assert not log.events


def test_cancellation_writes_no_failure() -> None:
    log = ListLog()

    async def main() -> None:
        started = asyncio.Event()

        @step
        async def hang(item: Any) -> None:
            started.set()
            await asyncio.Event().wait()

        task = asyncio.ensure_future(
            run_once(Pipeline("p", [Branch("b", {"x": hang, "y": ok})]), log, {})
        )
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not failed(log)
    assert str(log.folded().status) == "running"


def test_refused_fields_write_nothing() -> None:
    for fields in ({"x": Append(1)}, {"f": 1.5, "x": object()}, {3: 1}, {"x": {3: 1}}):
        again = step(name="again")(lambda item, fields=fields: fields)
        _, log = run(Pipeline("p", [step(name="a")(lambda item: {"x": 1}), again]))
        assert rows(log)[-1] == "FAILED again[1] (leaf in p)"
        assert log.fields() == {"x": 1}


@pytest.mark.parametrize("limit", ["MAX_VALUE_BYTES", "MAX_BATCH_BYTES"])
def test_too_large_values_are_refused_before_anything_is_written(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, limit, 100)
    fields = {"x": "a" * 60, "y": b"b" * 60} if limit == "MAX_BATCH_BYTES" else {"x": "a" * 120}
    result, log = run(Pipeline("p", [step(name="big")(lambda item: fields)]))
    assert (result.error or "").startswith("ValueTooLargeError")
    assert rows(log)[-1] == "FAILED big[0] (leaf in p)"
    seqs = sorted(event.item_seq for event in log.events)
    assert seqs == list(range(1, len(seqs) + 1))


def test_record_failure_stands_at_the_open_frame() -> None:
    from datagen_ray.pipeline.executor import Executor, RootTask

    pipeline = Pipeline("p", [ok, bad])
    _, log = run(pipeline)

    async def bury(root_id: str, inputs: Any) -> None:
        executor = Executor(pipeline, ListSink(log), run_id="run", blobs=log)
        await executor.start()
        task = RootTask(root_id, inputs, log.history(root_id))
        await executor.record_failure(task, "WorkerDied", "it died twice")
        await executor.close()

    asyncio.run(bury("5", None))
    assert rows(log)[-1] == "FAILED p[0] (sequence)"
    asyncio.run(bury("6", {"q": 1}))
    assert rows(log, "6") == ["FAILED input[0] (root)"]
    assert rerun(pipeline, log).status == "failed"


@pytest.mark.parametrize(
    "secret",
    [
        "sk-proj1234567890abcd",
        "ghp_abcdefghijklmnop1234",
        "AKIAABCDEFGHIJKLMNOP",
        "Bearer abcdefgh12345678",
        "password='hunter22'",
        '"access_key": "abcd1234"',
        "https://user:hunter22@host/path",
    ],
)
def test_redaction(secret: str) -> None:
    text = redact_secrets(f"before {secret} after")
    assert "[redacted]" in text
    assert text.startswith("before ")
    assert text.endswith(" after")
    for part in ("1234567890abcd", "hunter22", "abcd1234", "12345678"):
        assert part not in text


def test_class_that_cannot_be_set_up_is_named() -> None:
    @step
    class Broken:
        def __init__(self) -> None:
            raise OSError("no model")

        def __call__(self, item: Any) -> None: ...

    with pytest.raises(PipelineError, match="'Broken' could not be set up: OSError: no model"):
        run(Pipeline("p", [Broken()]))


@pytest.mark.parametrize("more", ["step", "predicate", "split", "reducer"])
def test_no_user_code_is_called_on_top_of_a_result_that_was_not_written(more: str) -> None:
    """The write of ``ok``'s result fails at once, without a turn of the loop in between."""

    def never(*_: Any) -> Any:
        raise AssertionError("called on top of what is not durable")

    following: dict[str, Any] = {
        "step": step(name="b")(lambda item: never()),
        "predicate": Conditional("c", when=lambda item: never(), then=bad),
        "split": MapReduce("m", split=lambda item: never(), each=bad, reduce=lambda r: never()),
        "reducer": MapReduce("m", split=lambda item: [], each=bad, reduce=lambda r: never()),
    }
    log = ListLog()
    sink = ListSink(log, limit=1)
    with pytest.raises(WriterFencedError):
        asyncio.run(run_once(Pipeline("p", [ok, following[more]]), log, {}, sink=sink))
    assert rows(log) == ["STEP_STARTED p[0] (sequence)"]


class Outlaw(BaseException):
    """Not an Exception, and nobody has heard of it."""


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize(
    "error",
    [
        Outlaw("x"),
        SystemExit(3),
        GeneratorExit(),
        StopIteration(1),
        StopAsyncIteration(1),
        asyncio.CancelledError(),
        asyncio.TimeoutError(),
        StorageError("of a log that the step reads"),
        WriterFencedError("of a log that the step writes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_step_raises_fails_its_item_and_nothing_else(
    error: BaseException, is_async: bool
) -> None:
    @step(name="wild")
    def plain(item: Any) -> None:
        raise error

    @step(name="wild")
    async def coroutine(item: Any) -> None:
        raise error

    result, log = run(Pipeline("p", [coroutine if is_async else plain]))
    assert (result.status, result.failures) == ("failed", 1)
    (row,) = failed(log)
    assert str(row.position) == "wild[0] (leaf in p)"


def test_an_interrupt_raised_in_a_thread_fails_its_item() -> None:
    @step
    def interrupted(item: Any) -> None:
        raise KeyboardInterrupt("nobody pressed a key")

    result, log = run(Pipeline("p", [interrupted]))
    assert result.error == "KeyboardInterrupt: nobody pressed a key"
    assert len(failed(log)) == 1


def test_a_retry_sees_the_storage_error_that_a_step_raised() -> None:
    calls: list[int] = []

    @step(retry=Retry(attempts=3, on=(StorageError,), wait_s=NO_WAIT))
    def reads_elsewhere(item: Any) -> dict[str, Any]:
        calls.append(1)
        if len(calls) < 3:
            raise StorageError("busy")
        return {"ok": 1}

    result, _ = run(Pipeline("p", [reads_elsewhere]))
    assert (result.status, len(calls)) == ("completed", 3)


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_trouble_of_this_log_under_a_blob_is_no_failure_of_the_item(is_async: bool) -> None:
    class Unreachable:
        async def load(self, event_id: str) -> bytes:
            raise StorageError("the log does not answer")

    @step(name="look")
    def plain(item: Any) -> dict[str, Any]:
        return {"size": len(item["shot"].read())}

    @step(name="look")
    async def coroutine(item: Any) -> dict[str, Any]:
        return {"size": len(await item["shot"].load())}

    @step(fields={"shot": bytes})
    def shoot(item: Any) -> dict[str, Any]:
        return {"shot": b"picture"}

    pipeline = Pipeline("p", [shoot, coroutine if is_async else plain])
    log = ListLog()
    with pytest.raises(WriterFencedError):
        asyncio.run(run_once(pipeline, log, {}, sink=ListSink(log, limit=2)))
    log.load = Unreachable().load  # type: ignore[method-assign]
    with pytest.raises(StorageError, match="does not answer"):
        rerun(pipeline, log)
    assert not failed(log)


def test_a_long_message_is_cut_before_it_is_redacted_and_shows_no_half_secret() -> None:
    seen: list[str] = []

    def redact(text: str) -> str:
        seen.append(text)
        return redact_secrets(text)

    limit = MAX_MESSAGE_CHARS
    secret = "sk-" + "x" * 40
    for cut in (limit // 2, limit):
        text = "a" * (cut - 20) + f" {secret} " + "b" * 1_000_000 + f" {secret} " + "c" * (cut - 20)
        kept = redacted(text, redact, limit)
        assert "x" * 8 not in kept
        assert len(kept) < limit + 100
    assert max(map(len, seen)) < 2 * limit + 100


class _Unreadable:
    def __repr__(self) -> str:
        raise ValueError("no repr")

    __str__ = __repr__


class _NeitherYesNorNo:
    def __bool__(self) -> bool:
        raise ValueError("the truth of this is ambiguous")


class _Trap(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no items")


@step
def idle(item: Any) -> None: ...


@step
def trapped(item: Any) -> Any:
    return _Trap(a=1)


@pytest.mark.parametrize(
    ("node", "kind"),
    [
        (Conditional("when", when=lambda item: _NeitherYesNorNo(), then=idle), "conditional"),
        (Loop("round", idle, until=lambda item: _NeitherYesNorNo(), max_rounds=3), "loop"),
        (
            Loop(
                "round", idle, until=lambda item: _NeitherYesNorNo(), max_rounds=3, check_first=True
            ),
            "loop",
        ),
        (Router("by", key=lambda item: _Unreadable(), routes={"a": idle}), "router"),
        (trapped, "leaf"),
    ],
    ids=["predicate", "loop test", "loop test first", "router key", "result"],
)
def test_an_answer_that_cannot_be_looked_at_is_a_failure_of_the_item(node: Any, kind: str) -> None:
    result, log = run(Pipeline("p", [node]))
    assert (result.status, result.failures) == ("failed", 1)
    (row,) = failed(log)
    assert str(row.position.step_kind) == kind


def test_the_reason_of_a_filter_may_be_anything() -> None:
    @step
    def drop(item: Any) -> None:
        raise Filtered(["too", "short"])  # type: ignore[arg-type]

    result, log = run(Pipeline("p", [drop]))
    assert result.status == "filtered"
    assert log.events[-1].error_dump == "['too', 'short']"


@pytest.mark.parametrize("answer", [None, ZeroDivisionError("x")], ids=["no text", "raises"])
def test_a_redact_filter_that_fails_lets_nothing_through(answer: Any) -> None:
    def redact(text: str) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    result, log = run(Pipeline("p", [bad], redact=redact))
    (row,) = failed(log)
    assert "redact" in row.error_dump
    assert "no luck" not in row.error_dump + row.traceback
    assert result.status == "failed"


def test_a_split_without_an_end_is_refused_after_one_sub_item_too_many() -> None:
    taken = itertools.count()
    endless = MapReduce(
        "m", split=lambda item: ({"n": n} for n in taken), each=idle, reduce=lambda found: {}
    )
    result, _ = run(Pipeline("p", [endless]))
    assert result.error is not None
    assert "more than 10000 sub-items" in result.error
    assert next(taken) == 10_001


@pytest.mark.parametrize(
    ("asked", "waited"), [("inf", 0.0), ("nan", 0.0), (1e300, MAX_ASKED_WAIT_S), (-5, 0.0)]
)
def test_a_service_is_not_believed_to_ask_for_any_wait(asked: Any, waited: float) -> None:
    error = OSError("busy")
    error.retry_after = asked  # type: ignore[attr-defined]
    assert asked_wait_s(error) == waited
