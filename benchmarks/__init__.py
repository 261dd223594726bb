"""One module a question; each prints its figures beside a named rival or limit of the same run."""
