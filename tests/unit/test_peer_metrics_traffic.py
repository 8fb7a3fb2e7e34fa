"""What payloads cost on the wire, told by the parameter."""

from p2pdiloco.peer.metrics import FRAMING_BYTES, PayloadTraffic


def test_bytes_are_told_by_the_parameter_and_the_receiver() -> None:
    traffic = PayloadTraffic([1000, 500])
    assert traffic.up_per_parameter() == traffic.down_per_parameter() == 0.0
    traffic.sent_up(0, bytes(744), 1)
    traffic.sent_up(1, bytes(244), 2)
    traffic.sent_down(1, bytes(1000 - FRAMING_BYTES), 3)
    assert traffic.up_per_parameter() == (1000 + 2 * 500) / (1000 + 2 * 500)
    assert traffic.down_per_parameter() == 3 * 1000 / (3 * 500)
