"""What payloads cost on the wire, told by the parameter."""

from p2pdiloco.peer.metrics import FRAMING_BYTES, PayloadTraffic


def test_bytes_are_told_by_the_parameter_and_the_receiver() -> None:
    up, down = PayloadTraffic([1000, 500]), PayloadTraffic([1000, 500])
    assert up.per_parameter() == down.per_parameter() == 0.0
    up.count(0, bytes(744), 1)
    up.count(1, bytes(244), 2)
    down.count(1, bytes(1000 - FRAMING_BYTES), 3)
    assert up.per_parameter() == (1000 + 2 * 500) / (1000 + 2 * 500)
    assert down.per_parameter() == 3 * 1000 / (3 * 500)
