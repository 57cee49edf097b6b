"""A layer in Python: writes a document and its event in one transaction, by the recorder of clients/python.

Arguments: the cluster file, the prefix of the bus, and the key of the document.
"""

import pathlib
import sys

import fdb

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "clients" / "python"))
import notibus  # noqa: E402

cluster, prefix, document = sys.argv[1], sys.argv[2].encode(), sys.argv[3].encode()
fdb.api_version(710)
db = fdb.open(cluster)
recorder = notibus.Recorder(prefix, db[notibus.config_key(prefix)])
instance = bytes([1] * 16)


@fdb.transactional
def write(tr, body, **events):
    tr[document] = body
    recorder.record(tr, "orders", instance, **events)


@fdb.transactional
def ring(tr):
    recorder.ring(tr, "orders")


write(db, b"1", created=1)
write(db, b"2", updated=2, ddocs=["_design/all"])
# One that is never committed: neither the document nor the event exists.
abandoned = db.create_transaction()
abandoned[document] = b"3"
recorder.record(abandoned, "abandoned", instance, created=1)
abandoned.reset()
ring(db)
