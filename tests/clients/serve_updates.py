"""Cloudant's client for Python, on `notibus serve` with a file of secrets: by its cookie, as a continuous feed and by long polls."""

import json
import os
import sys
import urllib.request
from base64 import b64encode

from cloudant.client import Cloudant

SECRET = os.environ["NOTIBUS_SECRET"]


def record(url, name, kind):
    headers = {
        "Authorization": "Basic " + b64encode(f"anna:{SECRET}".encode()).decode(),
        "Content-Type": "application/json",
    }
    body = json.dumps([{"db": name, "type": kind}]).encode()
    request = urllib.request.Request(f"{url}/_notibus/events", body, headers, method="POST")
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 201, answer.status


def main(url):
    client = Cloudant("anna", SECRET, url=url, connect=True)
    record(url, "one", "created")
    feed = client.db_updates(feed="continuous", limit=2, heartbeat=100)
    rows = iter(row for row in feed if row is not None)
    first = next(rows)
    assert (first["db_name"], first["type"]) == ("one", "created"), first
    record(url, "one", "updated")
    second = next(rows)
    assert (second["db_name"], second["type"]) == ("one", "updated"), second
    rows = [(row["db_name"], row["type"]) for row in client.db_updates(feed="longpoll") if row is not None]
    assert rows == [("one", "created"), ("one", "updated")], rows
    assert client.all_dbs() == ["one"], client.all_dbs()
    client.disconnect()


main(sys.argv[1])
