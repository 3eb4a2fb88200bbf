"""How often evolution culls its last newborn, by how good it is and by the rule for a newborn's rating.

    python benchmarks/newborns.py [--rounds 200] [--seed 0] [--rule 5% ...] [--size 4 ...] [--games 3 ...]

A role's members have scripted skills, in TrueSkill's points. They meet as `matchmake` says, play by TrueSkill's own
model (performance is skill plus noise of standard deviation beta), are rated by `rate` and replaced by
`evolution.plan`, a quarter of a role every ten steps. Of ten games, `--unsolved` are lost by both sides, as problems
are that nobody solves. Printed are the share of rounds in which a newborn as good as all others is culled, which would
be the share of the role that goes if nothing spoke against or for it, and the shares of newborns that are gone by the
first and by the fourth round after their birth if they are worse or better than all others by six points.
"""

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from populora_trainer.population.evolution import Breeding, Replacement, apply, plan, replaced_count
from populora_trainer.population.matchmaking import matchmake
from populora_trainer.population.members import PRIOR_SIGMA, Member, founders, ranked
from populora_trainer.population.ratings import BETA, Game, Result, environment, rate

EVERY = 10  # steps between rounds
FRACTION = 0.25  # of a role that goes
TRACKED = 4  # rounds for which a newborn of another skill is followed

# A rule returns a newborn's sigma from its parents; None leaves what evolution gave it.
Rule = Callable[[Sequence[Member]], float] | None


def wider(percent: float) -> Rule:
    """Return the rule of the parents' mean sigma, made wider."""
    return lambda parents: (1 + percent / 100) * math.fsum(one.sigma for one in parents) / len(parents)


RULES: dict[str, Rule] = {
    "evolution's": None,
    "prior": lambda parents: PRIOR_SIGMA,
    "parents' mean": wider(0),
    "parents' larger": lambda parents: max(one.sigma for one in parents),
    "mean + 3 %": wider(3),
    "mean + 5 %": wider(5),
    "mean + 10 %": wider(10),
}


@dataclass(frozen=True)
class Shares:
    """What became of newborns.

    Attributes:
        newborns: number of those that met a round after their birth.
        culled: share of them that went in the first one.
        rank: their mean rank in it, 0 the best of the role and 1 the worst.
        gone: share that went by round 1, 2, ... `TRACKED` after their birth, of those that were followed to their end.
    """

    newborns: int
    culled: float
    rank: float
    gone: tuple[float, ...]


def simulate(
    size: int, games: int, *, rounds: int, seed: int, lead: float = 0.0, unsolved: float = 0.0, rule: Rule = None
) -> Shares:
    """Return what becomes of newborns in a population of `size` teachers and `size` students.

    Args:
        games: per matchup and step.
        rounds: of evolution.
        lead: skill of the newborns that are followed, in points above all others, who are equal. Where it is not 0,
            one newborn of each role is followed at a time, so that it is compared with equals.
        unsolved: share of games that both sides lose.
        rule: of a newborn's sigma, in place of evolution's own.
    """
    generator = random.Random(seed)
    members = founders(size, size)
    skills = [0.0] * len(members)
    born: dict[int, int] = {}
    ages: Counter[int] = Counter()
    first: list[bool] = []
    first_ranks: list[float] = []
    for generation in range(1, rounds + 1):
        for _ in range(EVERY):
            members = rate(members, _play(members, skills, games, unsolved, generator))
        replacements = plan(
            members,
            generation,
            generation * EVERY,
            generator,
            replace_fraction=FRACTION,
            operators=[Breeding("M1", 1), Breeding("X1", 2)],
        )
        gone = {one.slot for one in replacements}
        places = {slot: place for role in ("teacher", "student") for place, slot in enumerate(ranked(members, role))}
        for slot, birth in list(born.items()):
            if generation - birth == 1:
                first.append(slot in gone)
                first_ranks.append(places[slot] / (size - 1))
            if slot in gone or generation - birth == TRACKED:
                ages[generation - birth if slot in gone else TRACKED + 1] += 1
                skills[slot] = 0.0
                del born[slot]
        members = apply(members, [_rated(one, members, rule) for one in replacements])
        for slot in gone:
            if not lead or all((slot < size) != (other < size) for other in born):
                born[slot] = generation
                skills[slot] = lead
    followed = max(1, ages.total())
    return Shares(
        len(first),
        sum(first) / len(first),
        math.fsum(first_ranks) / len(first),
        tuple(sum(ages[age] for age in range(1, last + 1)) / followed for last in range(1, TRACKED + 1)),
    )


def _rated(one: Replacement, members: Sequence[Member], rule: Rule) -> Replacement:
    if rule is None:
        return one
    return replace(one, child=replace(one.child, sigma=rule([members[parent] for parent in one.parents])))


def _play(
    members: Sequence[Member], skills: Sequence[float], games: int, unsolved: float, generator: random.Random
) -> list[Game]:
    spread = math.sqrt(2.0) * BETA
    margin = environment().ppf((environment().draw_probability + 1.0) / 2.0) * spread
    played = []
    for pair in matchmake(members, generator):
        for _ in range(games):
            lead = skills[pair.teacher] - skills[pair.student] + generator.gauss(0.0, spread)
            results: tuple[Result, Result] = ("win", "loss") if lead > 0 else ("loss", "win")
            if abs(lead) <= margin:
                results = ("draw", "draw")
            if generator.random() < unsolved:
                results = ("loss", "loss")
            played.append(Game(pair.teacher, pair.student, "code_o", *results))
    return played


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rule", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--size", nargs="+", type=int, default=[4])
    parser.add_argument("--games", nargs="+", type=int, default=[1, 3, 24])
    parser.add_argument("--unsolved", type=float, default=0.0)
    options = parser.parse_args()
    print(f"{'rule':16} size games   fair  equals   worse by 6, gone by 1, 4   better by 6, gone by 1, 4")
    for size in options.size:
        for games in options.games:
            for name in options.rule:
                equal, worse, better = (
                    simulate(
                        size,
                        games,
                        rounds=options.rounds,
                        seed=options.seed,
                        lead=lead,
                        unsolved=options.unsolved,
                        rule=RULES[name],
                    )
                    for lead in (0.0, -6.0, 6.0)
                )
                print(
                    f"{name:16} {size:4} {games:5}  {replaced_count(size, FRACTION) / size:5.0%}  {equal.culled:6.0%}"
                    f"   {worse.gone[0]:18.0%}, {worse.gone[-1]:4.0%}   {better.gone[0]:19.0%}, {better.gone[-1]:4.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
