"""The clock's queueing and its proof that the host was ahead, on a simulated stream with a time of its own."""

from __future__ import annotations

import pytest

from tcache.bench import timing
from tcache.bench.timing import CudaClock, Plan, interleave


class Stream:
    """Host and GPU as two times in milliseconds: what is queued begins when both have come to it."""

    def __init__(self):
        self.host = self.gpu = 0.0
        self.spins = []

    def run(self, ms):
        self.gpu = max(self.gpu, self.host) + ms

    def _sleep(self, cycles):
        self.spins.append(cycles / 2e6)
        self.run(cycles / 2e6)

    def synchronize(self):
        self.host = max(self.host, self.gpu)

    def Event(self, enable_timing):  # noqa: N802 - torch's name
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, stream):
        self.stream = stream

    def record(self):
        self.stream.run(0.0)
        self.at = self.stream.gpu

    def query(self):
        return self.at <= self.stream.host

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.fixture
def stream(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: stream.host / 1e3)
    return stream


def calling(stream, host, *kernels, waits=False):
    def call():
        for ms in kernels:
            stream.host += host / len(kernels)
            stream.run(ms)
        if waits:
            stream.synchronize()

    return call


def clock(stream):
    return CudaClock(1024, cuda=stream, device="cpu", least=0)


def test_the_time_is_the_gpus(stream):
    samples = clock(stream)([calling(stream, 0.05, 0.002, 0.003)] * 20)
    assert [sample.ms for sample in samples] == [pytest.approx(0.005)] * 20
    assert [sample.host_ms for sample in samples] == [pytest.approx(0.05)] * 20
    assert all(sample.ahead for sample in samples)


def test_a_slow_host_is_given_a_longer_lead(stream):
    made = clock(stream)
    slow = [calling(stream, 1.0, 0.1)] * 10
    first, second = made(slow), made(slow)
    assert [sample.ahead for sample in first] == [True] * 2 + [False] * 8  # the lead of 2 ms is used up
    assert first[-1].ms == pytest.approx(1.0)  # the host is in it
    assert [sample.ahead for sample in second] == [True] * 10
    assert [sample.ms for sample in second] == [pytest.approx(0.1)] * 10
    assert stream.spins == [2.0, pytest.approx(15.0)]


def test_a_call_that_waits_is_never_ahead(stream):
    [series] = interleave([[calling(stream, 0.01, 0.5, waits=True)]], clock(stream), Plan(fewest=10, most=10))
    assert not series.ahead
    assert len(series.times()) == 10


def test_alternatives_share_a_batch(stream):
    one, other = interleave(
        [[calling(stream, 0.02, 0.3)], [calling(stream, 0.05, 0.2, 0.2)]], clock(stream), Plan(6.0, 5, 50)
    )
    assert one.times() == [pytest.approx(0.3)] * 8  # 6 ms for rounds of 0.7 ms
    assert other.times() == [pytest.approx(0.4)] * 8
    assert len(stream.spins) == 2  # the round that finds how many, and the batch


def test_the_buffer_is_larger_than_the_cache(stream):
    assert CudaClock(1000, cuda=stream, device="cpu", least=16)._buffer.nbytes == 4000
    assert CudaClock(1000, cuda=stream, device="cpu", least=8000)._buffer.nbytes == 8000
