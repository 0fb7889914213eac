"""A lost peer: every survivor's wait ends with an error that names that rank and no other."""

import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.errors import PeerLost
from thinwire.wire.codecs import Codec, Dense, Int8
from thinwire.wire.flight import Flight
from thinwire.wire.heartbeat import Heartbeat, Watch

TIMEOUT = 1.5


def named(message: str) -> set[int]:
    """The ranks a PeerLost blames."""
    return {int(rank) for rank in re.findall(r"rank (\d+) \(", message)}


def vanish(how: str) -> None:
    """The end of this rank, in one of the ways a rank can go."""
    if how == "dies":
        os._exit(7)
    if how == "freezes":
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()  # "idles": alive, its heart beats, but it never comes


def error_of(flight: Flight) -> str:
    with pytest.raises(PeerLost) as caught:
        flight.wait()
    return str(caught.value)


def until_lost(victim: int, how: str, codec: Codec) -> tuple[str, str]:
    """The error in which a run of means ends, and that of a transfer after it."""
    world = tw.init(timeout=TIMEOUT)
    wire = tw.Wire(name="training")
    for step in range(3):
        assert world.heartbeat is not None
        world.heartbeat.note = f"step {step}"
        wire.mean(torch.ones(1000), codec).wait()
    if wire.rank == victim:
        vanish(how)
    first = error_of(wire.mean(torch.ones(1000), codec))
    return first, error_of(wire.mean(torch.ones(1000), codec))


@pytest.mark.parametrize(("victim", "codec"), [(0, Dense()), (1, Int8()), (2, Dense())])
def test_a_rank_that_dies_is_named(ranks, victim: int, codec: Codec) -> None:
    answers = ranks(3, until_lost, victim, "dies", codec, silent=[victim])
    for rank in {0, 1, 2} - {victim}:
        first, second = answers[rank]
        assert named(first) == {victim}, first
        assert second == first, "a broken wire says why again"


@pytest.mark.parametrize(("victim", "own_store"), [(0, True), (0, False), (2, True)])
def test_a_rank_that_freezes_is_named(ranks, victim: int, own_store: bool) -> None:
    """Also when the store freezes with it, and every call to the store with that."""
    answers = ranks(3, until_lost, victim, "freezes", Int8(), silent=[victim], own_store=own_store)
    for rank in {0, 1, 2} - {victim}:
        assert named(answers[rank][0]) == {victim}, answers[rank][0]
        assert answers[rank][0] == answers[rank][1]


def test_the_rank_that_keeps_the_store_dies(ranks) -> None:
    answers = ranks(3, until_lost, 0, "dies", Dense(), silent=[0], own_store=True)
    for first, second in answers[1:]:
        assert named(first) == {0}, first
        assert second == first


@pytest.mark.parametrize("codec", [Dense(), Int8()], ids=["dense", "int8"])
def test_a_rank_that_answers_but_never_comes_is_named(ranks, codec: Codec) -> None:
    answers = ranks(3, until_lost, 2, "idles", codec, silent=[2])
    for first, second in answers[:2]:
        assert named(first) == {2}, first
        assert "answers" in first
        assert "after 'step 2'" in first
        assert "has not come to transfer 4 of 'training'" in first
        assert second == first


def until_silent(victim: int, kind: str) -> str:
    """The error of a point-to-point transfer with a rank that is there but does nothing."""
    tw.init(timeout=TIMEOUT)
    wire = tw.Wire(name="pipe")
    wire.barrier()
    if wire.rank == victim:
        vanish("idles")
    x = torch.ones(4)
    return error_of(wire.recv(x, victim) if kind == "recv" else wire.exchange(x, [victim], [0.5]))


@pytest.mark.parametrize("kind", ["recv", "exchange"])
def test_a_message_that_never_comes_names_its_sender(ranks, kind: str) -> None:
    message, _ = ranks(2, until_silent, 1, kind, silent=[1])
    assert named(message) == {1}, message


def patient(kind: str) -> tuple[float, bool]:
    """Rank 1 comes only when rank 0 has looked after it for longer than the timeout."""
    world = tw.init(timeout=TIMEOUT)
    wire = tw.Wire()
    store = dist.distributed_c10d._get_default_store()
    wire.barrier()
    began = time.monotonic()
    looked = 0
    if wire.rank == 1:
        store.get("come")
    else:
        lost = Watch.lost

        def look(watch: Watch) -> dict[int, str]:
            nonlocal looked
            looked += 1
            if looked > 15:  # each after a tenth of the timeout
                store.set("come", "")
            return lost(watch)

        Watch.lost = look  # type: ignore[method-assign]
    x = torch.full((250_000,), float(wire.rank))  # large: given time by the assumed rate
    if kind == "mean":
        return wire.mean(x).wait()[0].item(), time.monotonic() - began > world.timeout
    if wire.rank == 1:
        wire.send(x, 0).wait()
        return 1.0, True
    return wire.recv(x, 1).wait()[0].item(), time.monotonic() - began > world.timeout


@pytest.mark.parametrize("kind", ["mean", "message"])
def test_a_peer_that_is_only_slow_is_waited_for(ranks, kind: str) -> None:
    answers = ranks(2, patient, kind)
    assert [value for value, _ in answers] == [0.5 if kind == "mean" else 1.0] * 2
    assert answers[0][1], "the test must outlast the timeout"


def computing_meanwhile() -> str:
    """Rank 2 dies; rank 0 finds out and leaves, and the store with it, before rank 1 looks."""
    world = tw.init(timeout=TIMEOUT)
    wire = tw.Wire()
    wire.barrier()
    if wire.rank == 2:
        vanish("dies")
    if wire.rank == 1:
        heart = world.heartbeat
        assert heart is not None
        with heart._changed:
            assert heart._changed.wait_for(lambda: heart._failure, timeout=60)
    return error_of(wire.mean(torch.ones(10)))


def test_blame_does_not_fall_on_a_survivor_that_left(ranks) -> None:
    answers = ranks(3, computing_meanwhile, silent=[2], own_store=True)
    for message in answers[:2]:
        assert named(message) == {2}, message


def chain() -> str:
    """Rank 3 dies. Only rank 0 deals with it; the others meet a survivor that has left."""
    tw.init(timeout=TIMEOUT)
    pairs = [dist.new_group([0, 3]), dist.new_group([0, 1]), dist.new_group([1, 2])]
    wires = {}
    for name, group in zip("abc", pairs, strict=True):
        if dist.get_rank() in dist.get_process_group_ranks(group):
            wires[name] = tw.Wire(group, name=name)
            wires[name].barrier()
    if dist.get_rank() == 3:
        vanish("dies")
    first = {0: "a", 1: "b", 2: "c"}[dist.get_rank()]
    return error_of(wires[first].mean(torch.ones(10)))


def test_blame_follows_the_chain_to_the_first_that_went(ranks) -> None:
    answers = ranks(4, chain, silent=[3])
    for message in answers[:3]:
        assert named(message) == {3}, message


def several_wires(how: str) -> list[str]:
    tw.init(timeout=TIMEOUT)
    wires = [tw.Wire(name=name) for name in "abcd"]
    for wire in wires:
        wire.barrier()
    if wires[0].rank == 1:
        vanish(how)
    codecs = [Dense(), Int8(), Dense(), Int8()]
    flights = [w.mean(torch.ones(500), c) for w, c in zip(wires, codecs, strict=True)]
    return [error_of(flight) for flight in flights]


@pytest.mark.parametrize("how", ["dies", "freezes"])
def test_wires_that_fail_at_once_all_name_the_rank(ranks, how: str) -> None:
    answers = ranks(3, several_wires, how, silent=[1])
    for messages in (answers[0], answers[2]):
        assert [named(m) for m in messages] == [{1}] * 4, messages


def given_up_on(seconds: float) -> str:
    """Rank 1 is stopped by the test's own means until rank 0 has given it up."""
    world = tw.init(timeout=TIMEOUT)
    wire = tw.Wire()
    wire.barrier()
    if wire.rank == 0:
        return error_of(wire.mean(torch.ones(3)))
    heart = world.heartbeat
    assert heart is not None
    with heart._changed:
        assert heart._changed.wait_for(
            lambda: any(1 in beat.lost for beat in heart._beats.values()), timeout=seconds
        )
    return error_of(wire.mean(torch.ones(3)))


def test_a_rank_that_was_given_up_hears_it(ranks) -> None:
    ours, theirs = ranks(2, given_up_on, 60.0)
    assert named(ours) == {1}
    assert "gave it up" in theirs
    assert named(theirs) == set()


def leaves(own_store: bool) -> str:
    tw.init(timeout=TIMEOUT)
    wire = tw.Wire()
    wire.barrier()
    if wire.rank == 1:
        tw.shutdown()
        threading.Event().wait()
    return error_of(wire.mean(torch.ones(3)))


def test_a_rank_that_left_is_named_as_such(ranks) -> None:
    message, _ = ranks(2, leaves, False, silent=[1])
    assert named(message) == {1}
    assert "left after" in message


# -- the heartbeat by itself --------------------------------------------------------------------


def hearts(size: int, **settings: float) -> list[Heartbeat]:
    store = dist.HashStore()
    made = []
    for rank in range(size):
        heart = Heartbeat(store, rank, size, host=f"h{rank}", interval=0.02, **settings)
        heart._prefix = "same/"  # this process is in all of these worlds at once
        heart._write()
        made.append(heart)
    return made


def silence(heart: Heartbeat) -> None:
    """No goodbye: its thread ends as that of a killed process does."""
    heart._write = lambda: None  # type: ignore[method-assign]


def test_living_ranks_are_no_suspects_and_silent_ones_are() -> None:
    a, b, c = hearts(3, grace=0.3)
    assert a.suspects([0, 1, 2]) == {}
    c.note = "step 9"
    with a.watch([2]), a._changed:  # until the note is in the store
        assert a._changed.wait_for(lambda: a._beats[2].note == "step 9", timeout=30)
    silence(c)
    assert a.suspects([0, 1, 2]) == {2: "on h2, silent after 'step 9'"}
    assert b.suspects([0, 1]) == {}, "nobody asked after rank 2"


def test_suspects_may_be_asked_by_many_threads_at_once() -> None:
    a, b, c = hearts(3, grace=0.3)
    silence(b)
    found: list[dict[int, str]] = []
    threads = [
        threading.Thread(target=lambda: found.append(a.suspects([0, 1, 2]))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [set(suspects) for suspects in found] == [{1}] * 8
    assert a._watchers == 0
    assert set(c.suspects([0, 1])) == {1}


def test_a_rank_that_never_wrote_is_not_called_lost() -> None:
    store = dist.HashStore()
    a = Heartbeat(store, 0, 3, host="h", interval=0.02)
    assert a.suspects([0, 1, 2]) == {}


def test_what_one_rank_found_all_repeat() -> None:
    a, b, c = hearts(3, grace=5.0)
    b.found_lost({2: "on h2, gone"})
    with a._changed:
        assert a._changed.wait_for(lambda: a._published == {2}, timeout=30)
    assert a.suspects([0, 1]) == {2: "on h2, gone"}, "at once, and without asking after rank 2"
    with c._changed:
        assert c._changed.wait_for(lambda: c.given_up, timeout=30)
    assert c._lost == {}, "nobody blames itself"
