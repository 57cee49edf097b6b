"""pycouchdb: follows `_db_updates` by POST, which CouchDB itself does not allow."""

import sys
import threading

import pycouchdb
from pycouchdb.exceptions import Conflict, NotFound
from pycouchdb.feedreader import BaseFeedReader

from seen import Seen


class Reader(BaseFeedReader):
    """Passes on the rows of the feed."""

    def __init__(self, seen):
        self.seen = seen

    def on_message(self, message):
        self.seen.push(message)


def follow(url, **options):
    """Returns a `Seen` that gets the rows of a feed."""
    seen = Seen()
    feed = lambda: pycouchdb.Server(url).changes_feed(Reader(seen), **options)
    threading.Thread(target=feed, daemon=True).start()
    return seen


def main(url):
    server = pycouchdb.Server(url)
    assert server.version()
    seen = follow(url, limit=5, heartbeat=100)

    orders = server.create("orders")
    seen.next(db_name="orders", type="created")
    order = orders.save({"_id": "1", "sum": 1})
    seen.next(db_name="orders", type="updated")
    orders.save_bulk([{"_id": "2"}, {"_id": "3"}])
    seen.next(db_name="orders", type="updated")
    try:
        orders.save({"_id": "1", "sum": 2})
        raise AssertionError("a conflict was not delivered")
    except Conflict:
        pass
    orders.save({**order, "sum": 2})
    seen.next(db_name="orders", type="updated")
    server.delete("orders")
    last = seen.next(db_name="orders", type="deleted")
    seen.next(last_seq=last["seq"])
    seen.end()

    try:
        server.database("orders")
        raise AssertionError("the database is still there")
    except NotFound:
        pass

    # Only clients that ask for updates of design documents get them as such.
    views = server.create("views")
    delivered = follow(url, limit=1, since=last["seq"], types="ddoc_updated", heartbeat=100)
    views.save({"_id": "_design/views", "views": {}})
    delivered.next(db_name="views", type="ddoc_updated")
    assert [row["id"] for row in views.all(as_list=True)] == ["_design/views"]


main(sys.argv[1])
