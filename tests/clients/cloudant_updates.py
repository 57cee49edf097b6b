"""Cloudant's client for Python: follows `_db_updates`, as a continuous feed and by long polls."""

import sys
import threading

from cloudant.client import Cloudant, CouchDB

from seen import Seen


def continuous(url, since, limit):
    """Returns a `Seen` that gets the rows of a continuous feed, at most `limit` of them."""
    seen = Seen()
    client = Cloudant(None, None, admin_party=True, url=url, connect=True)

    def follow():
        feed = client.db_updates(feed="continuous", since=since, limit=limit, heartbeat=100)
        for row in feed:
            # An empty line is a heartbeat.
            if row is not None:
                seen.push(row)
        seen.push({"last_seq": feed.last_seq})

    threading.Thread(target=follow, daemon=True).start()
    return seen


def longpoll(client, **options):
    """Returns the rows of one long poll, and the position at which it ended."""
    feed = client.db_updates(feed="longpoll", **options)
    rows = [(row["db_name"], row["type"]) for row in feed if row is not None]
    return rows, feed.last_seq


def main(url):
    client = Cloudant(None, None, admin_party=True, url=url, connect=True)
    start = client.db_updates(since="now")
    assert list(start) == []
    seen = continuous(url, start.last_seq, 5)

    one = client.create_database("one")
    seen.next(db_name="one", type="created")
    document = one.create_document({"_id": "x", "n": 1})
    seen.next(db_name="one", type="updated")
    document["n"] = 2
    document.save()
    seen.next(db_name="one", type="updated")
    client.create_database("two")
    seen.next(db_name="two", type="created")
    client.delete_database("one")
    last = seen.next(db_name="one", type="deleted")
    seen.next(last_seq=last["seq"])
    seen.end()

    # A long poll answers at once if there is news, with each database once, and otherwise waits.
    rows, last_seq = longpoll(client, since=start.last_seq)
    assert rows == [("two", "created"), ("one", "deleted")], rows
    assert last_seq == last["seq"]
    assert longpoll(client, since=last_seq, timeout=200) == ([], last_seq)
    waiting = Seen()
    poll = lambda: waiting.push(longpoll(client, since=last_seq, heartbeat=100)[0])
    threading.Thread(target=poll, daemon=True).start()
    client.create_database("three")
    assert waiting.take() == [("three", "created")]

    # The class `CouchDB` cannot name a position, and asks for heartbeats.
    couch = CouchDB(None, None, admin_party=True, url=url, connect=True)
    rows, _ = longpoll(couch)
    assert rows == [("two", "created"), ("one", "deleted"), ("three", "created")], rows
    assert sorted(couch.all_dbs()) == ["three", "two"]

    changes = client["two"].changes(feed="continuous", heartbeat=100, include_docs=True)
    written = client["two"].create_document({"_id": "y"})
    row = next(row for row in changes if row is not None)
    assert row["id"] == "y" and row["changes"] == [{"rev": written["_rev"]}], row
    changes.stop()


main(sys.argv[1])
