"""What a mechanism counts is read once, by the name of its metric."""

from concurrent.futures import ThreadPoolExecutor

from evolver.metrics import Meter


def test_a_reading_holds_sums_and_means_since_the_last_one():
    meter = Meter("room", "asked", "rate")
    meter.count("asked", 2)
    meter.count("asked")
    meter.count("other", 0.5)
    meter.average("rate", True)
    meter.average("rate", 0.5)
    assert meter.read() == {"room/asked": 3, "room/other": 0.5, "room/rate": 0.75}
    assert meter.read() == {"room/asked": 0, "room/rate": 0}


def test_threads_lose_no_count():
    meter = Meter("room")
    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(lambda: [meter.count("n") for _ in range(5000)])
    assert meter.read() == {"room/n": 20000}
