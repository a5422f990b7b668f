"""Tables of a store, beside what test_store_format.py and test_store_verify.py read of them."""

import subprocess
import sys

PROGRAM = """
import os
import pyarrow as pa
from eyas.store.tables import parse_table, table_bytes

def threads():
    return len(os.listdir("/proc/self/task"))

schema = pa.schema([("a", pa.int64()), ("b", pa.string()), ("c", pa.int32()), ("d", pa.float64())])
rows = list(range(200_000))
table = pa.table({"a": rows, "b": [str(row) for row in rows], "c": rows, "d": [float(row) for row in rows]}, schema)
raw, before = table_bytes(table), threads()
assert parse_table(raw, "here", schema).equals(table)
print(threads() - before)
"""


def test_a_table_is_read_without_threads() -> None:
    """One of pyarrow's that still holds bytes of Python's when the interpreter ends makes the process abort."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "0\n", ran.stderr
