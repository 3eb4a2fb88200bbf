from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from populora_trainer.sandbox.turns import ClientTurns, Turns

CHARGE = 10.0


def simulate(turns, work, workers, arrivals=()):
    """Run parties' work on some workers; return in order of start (moment, party, end).

    Args:
        work: seconds of each run, by party; a party waits as long as it has one left.
        arrivals: by party, when it begins to wait; 0 where it is not named.
    """
    arrivals = dict(arrivals)
    left = {party: list(runs) for party, runs in work.items()}
    waiting = {party: arrivals.get(party, 0.0) for party in work}
    running, started, now = [], [], 0.0
    while any(left.values()) or running:
        for party in [one for one, moment in waiting.items() if moment <= now]:
            del waiting[party]
            turns.put(party)
        while len(running) < workers and (party := turns.first()) is not None:
            seconds = left[party].pop(0)
            turns.begin(party)
            running.append((now + seconds, party, seconds))
            started.append((now, party, now + seconds))
            if not left[party]:
                turns.drop(party)
        now = min([end for end, *_ in running] + [moment for moment in waiting.values() if moment > now])
        for entry in [one for one in running if one[0] <= now]:
            running.remove(entry)
            turns.end(entry[1], entry[2])
            if not left[entry[1]]:
                turns.leave(entry[1])
    return started


seconds = st.floats(0.001, CHARGE, allow_nan=False)
works = st.dictionaries(st.integers(0, 4), st.lists(seconds, min_size=1, max_size=12), min_size=1, max_size=5)


@given(works, st.integers(1, 3))
def test_every_run_is_made_once_and_nothing_is_kept(work, workers):
    turns = Turns(CHARGE)
    started = simulate(turns, work, workers)
    assert Counter(party for _, party, _ in started) == {party: len(runs) for party, runs in work.items()}
    assert len(turns) == 0
    assert turns.first() is None


@given(works, st.integers(1, 3))
@settings(max_examples=200)
def test_parties_that_wait_all_the_time_get_the_same_time(work, workers):
    started = simulate(Turns(CHARGE), work, workers)
    spent, running = Counter(), []
    last = {party: max(moment for moment, one, _ in started if one == party) for party in work}
    for moment, party, end in started:
        for entry in [one for one in running if one[0] <= moment]:
            running.remove(entry)
            spent[entry[1]] += entry[2]
        others = [other for other in work if other != party and last[other] >= moment]
        # Whoever is served has had no more than anybody else who waits, but for what is going on.
        for other in others:
            going_on = sum(CHARGE for _, one, _ in running if one == other)
            assert spent[party] <= spent[other] + going_on + 1e-6
        running.append((end, party, end - moment))


@given(st.lists(seconds, min_size=4, max_size=30), st.floats(0, 50), st.integers(1, 3))
def test_a_newcomer_waits_for_what_is_running_and_not_for_what_is_queued(hanging, arrival, workers):
    started = simulate(Turns(CHARGE), {"a": hanging, "b": [0.001]}, workers, {"b": arrival})
    before = [moment for moment, party, _ in started if party == "a" and moment > arrival]
    (begun,) = [moment for moment, party, _ in started if party == "b"]
    # Those of "a" that were started after the newcomer had come and before its turn.
    assert sum(moment < begun for moment in before) == 0


def test_a_party_gains_nothing_by_having_been_away():
    turns = Turns(CHARGE)
    turns.put("idle")
    turns.drop("idle")
    turns.put("busy")
    for _ in range(100):
        turns.begin("busy")
        turns.end("busy", 1.0)
    turns.put("idle")
    served = Counter()
    for _ in range(20):
        party = turns.first()
        served[party] += 1
        turns.begin(party)
        turns.end(party, 1.0)
    assert abs(served["idle"] - served["busy"]) <= 2


def test_many_parties_get_a_client_no_more_time():
    turns = ClientTurns(CHARGE)
    for number in range(50):
        turns.put("greedy", number)
    turns.put("modest", "only")
    served = Counter()
    for _ in range(100):
        party = turns.first()
        client = "modest" if party == "only" else "greedy"
        served[party] += 1
        turns.begin(client, party)
        turns.end(client, party, 1.0)
    assert served.pop("only") == 50
    assert set(served.values()) == {1}


def test_out_of_date_entries_do_not_pile_up():
    turns = Turns(CHARGE)
    for party in range(3):
        turns.put(party)
    for _ in range(10_000):
        party = turns.first()
        turns.begin(party)
        turns.end(party, 0.001)
    assert len(turns._heap) < 200
