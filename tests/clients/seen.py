"""What a client has seen, to be compared with what was done: rows wait here until the script asks for them."""

import queue

# How long a row may take, in seconds.
PATIENCE = 30


class Seen:
    """Rows in the order in which they came."""

    def __init__(self):
        self._rows = queue.Queue()

    def push(self, row):
        self._rows.put(row)

    def take(self):
        """The next row."""
        return self._rows.get(timeout=PATIENCE)

    def next(self, **expected):
        """The next row, which must be like `expected`."""
        row = self.take()
        assert {key: row.get(key) for key in expected} == expected, (row, expected)
        return row

    def end(self):
        """Nothing came besides what was asked for."""
        assert self._rows.empty(), self._rows.get()
