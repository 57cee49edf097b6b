"""Cloudant's client for Python with its default log-in, by a cookie."""

import sys

from cloudant.client import CouchDB
from requests.exceptions import HTTPError


def main(url):
    try:
        CouchDB("anna", "wrong", url=url, connect=True)
        raise AssertionError("a wrong secret was taken")
    except HTTPError as error:
        assert error.response.status_code == 401, error
    client = CouchDB("anna", "0123456789abcdef0123456789abcdef", url=url, connect=True)
    assert client.session()["userCtx"]["name"] == "anna", client.session()
    client.create_database("one")
    rows = [(row["db_name"], row["type"]) for row in client.db_updates(feed="longpoll") if row is not None]
    assert rows == [("one", "created")], rows
    client.disconnect()


main(sys.argv[1])
