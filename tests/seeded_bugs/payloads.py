"""Bugs in what payloads are in bytes, and in their places on the disk."""

from __future__ import annotations

from tests.seeded_bugs.inject import Bug

BUGS = (
    Bug(
        name="a stored body may be of any size",
        module="p2pdiloco.codec.compression",
        where="_opened",
        old="is_stored and max(sizes, default=0) > max_bytes",
        new="False",
        harm="what is bounded elsewhere by its size is not",
        killed_by=("tests/property/test_compression.py::test_stored_bodies_are_no_larger_than_they_may_be",),
    ),
    Bug(
        name="without the library bodies have no room before them",
        module="p2pdiloco.codec.quantization",
        where="encode_vector",
        old="bytearray(room)",
        new="bytearray()",
        harm="the index is written over the first body",
        killed_by=("tests/property/test_compression.py::test_stored_bodies_are_neither_coded_nor_copied",),
    ),
    Bug(
        name="a place that is given back does not join the gap before it",
        module="p2pdiloco.peer.payload_store",
        where="FileAllocator.free",
        old="index and self._gaps[index - 1].end == place.at",
        new="False",
        harm="the disk fills with gaps that are too small",
        killed_by=("tests/property/test_places.py::test_places_share_nothing_and_gaps_are_used",),
    ),
    Bug(
        name="each piece has a place of its own size",
        module="p2pdiloco.peer.payload_store",
        where="",
        old="STEPS = 32",
        new="STEPS = 1 << 30",
        harm="the event loop looks through thousands of slivers",
        killed_by=("tests/property/test_places.py::test_pieces_of_nearly_one_size_leave_no_slivers",),
    ),
    Bug(
        name="a read that failed counts as running",
        module="p2pdiloco.peer.payload_store",
        where="PayloadStore.fetch",
        old="self._reading_bytes -= held.size\nif future.cancelled():\n    return",
        new="if future.cancelled() or future.exception() is None:\n    self._reading_bytes -= held.size",
        harm="after 64 MiB that a disk has lost no payload is read any more",
        killed_by=("tests/unit/test_peer_payload_store.py::test_reads_that_failed_leave_room_for_others",),
    ),
)
