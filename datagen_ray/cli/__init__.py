"""The command line, ``datagen-ray``: one file a command or group of commands that read alike.

Exit status: 0 done; 1 it could not be done, or some roots failed; 2 what was asked cannot be right,
and nothing was written; 130 interrupted. Errors are one line on standard error, what was asked for
is on standard output.
"""
