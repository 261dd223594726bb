"""The log itself: ids, events, values, their Arrow form, the rules of writing, the fold.

Pure functions and immutable values; nothing here opens a file. pyarrow is used in ``schema`` only.
"""
