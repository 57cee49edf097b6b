"""The rows that a client has seen. They wait here until the script compares them with what was done."""

import queue

# How long a row may take, in seconds.
PATIENCE = 30


class Seen:
    """Rows in the order in which they arrived."""

    def __init__(self):
        self._rows = queue.Queue()

    def push(self, row):
        self._rows.put(row)

    def take(self):
        """Returns the next row."""
        return self._rows.get(timeout=PATIENCE)

    def next(self, **expected):
        """Returns the next row, which must match `expected`."""
        row = self.take()
        assert {key: row.get(key) for key in expected} == expected, (row, expected)
        return row

    def end(self):
        """Fails if there are further rows."""
        assert self._rows.empty(), self._rows.get()
