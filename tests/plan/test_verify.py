"""A program is accepted if, and only if, it runs: compared with a slow interpreter that knows nothing of the verifier.

Mutations of valid programs are rejected with a message that names the action and its direct blocker, or the
interpreter shows that they are equivalent.
"""

import itertools
import random
from collections import Counter, defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_strategies import executed, scheduled

from engine.plan.actions import COMPUTE, Action, Op, Placement, Program
from engine.plan.lowering import lower
from engine.plan.schedules import build
from engine.plan.verify import InvalidProgram, peak_in_flight, verify
from engine.plan.views.text import from_csv

FAR = {Op.SEND_F: 1, Op.RECV_F: -1, Op.SEND_B: -1, Op.RECV_B: 1}  # where a message's other end is
GRADIENT = (Op.B, Op.I)
Key = tuple[int, Op, int]


def runs(program: Program) -> bool:
    """Whether the program lists a whole step, or a whole evaluation, and executes to its end."""
    rows = [list(program.actions(r)) for r in range(program.ranks)]
    if not all(paired(row) for row in rows):
        return False
    listed = Counter(a._replace(fused=False) for row in rows for a in row)
    tail = {a for a in listed if a.op in (Op.REDUCE, Op.STEP, Op.GATHER)}
    if {a: n for a, n in listed.items() if a not in tail} != dict(whole(program, listed)):
        return False
    return tail_whole(program, rows) and Interpreter(program, rows).ends()


def paired(row: list[Action]) -> bool:
    """Whether what is to overlap the next action is a computation, and the next one too, of no other pair."""
    return not any(a.fused for a in row[-1:]) and all(
        a.op in COMPUTE and b.op in COMPUTE and not b.fused for a, b in itertools.pairwise(row) if a.fused
    )


def whole(program: Program, listed: Counter[Action]) -> Counter[Action]:
    """The computations and messages that a program with these actions must list."""
    place = program.placement
    trained = any(a.op in (Op.B, Op.I, Op.W) for a in listed)
    halves = {(a.stage, a.microbatch) for a in listed if a.op in (Op.I, Op.W)}
    lowered = any(a.op in FAR for a in listed)
    expected: Counter[Action] = Counter()
    for s, m in itertools.product(range(program.stages), range(program.microbatches)):
        backward = ((Op.I, Op.W) if (s, m) in halves else (Op.B,)) if trained else ()
        expected.update(Action(s, op, m) for op in (Op.F, *backward))
        for op, step in FAR.items() if lowered else ():
            crosses = 0 <= s + step < program.stages and place.rank(s, m) != place.rank(s + step, m)
            if crosses and (trained or op.name.endswith("F")):
                expected[Action(s, op, m)] += 1
    return expected


def tail_whole(program: Program, rows: list[list[Action]]) -> bool:
    """REDUCE and GATHER on no stage or on every one, STEP on no rank or on every one; where needed, in its place."""
    for op in (Op.REDUCE, Op.STEP, Op.GATHER):
        found = [(r, k, a) for r, row in enumerate(rows) for k, a in enumerate(row) if a.op is op]
        if not found:
            continue
        if op is Op.REDUCE:
            wanted = [(r, s) for r in range(program.ranks) for s in program.placement.stages_of(r)]
            later = ((rows[r][k:], (a.stage,)) for r, k, a in found)
            early = any(b.op in (Op.B, Op.W) and b.stage in stages for rest, stages in later for b in rest)
            have = [(r, a.stage) for r, _, a in found]
        elif op is Op.GATHER:
            wanted = [(r, s) for r in range(program.ranks) for s in program.placement.stages_of(r)]
            early = any(not any(b.op is Op.STEP for b in rows[r][:k]) for r, k, _ in found)
            have = [(r, a.stage) for r, _, a in found]
        else:
            wanted = [r for r in range(program.ranks) if program.placement.stages_of(r)]
            early = any(b.op is not Op.GATHER for r, k, _ in found for b in rows[r][k + 1 :])
            have = [r for r, _, a in found if a.stage in program.placement.stages_of(r)]
        untrained = not any(a.op in (Op.B, Op.W) for row in rows for a in row)
        if early or untrained or any(a.microbatch >= 0 for _, _, a in found) or sorted(have) != sorted(wanted):
            return False
    return True


class Interpreter:
    """Executes a program one action at a time, with a queue for each channel. False as soon as anything is wrong."""

    def __init__(self, program: Program, rows: list[list[Action]]) -> None:
        self.place, self.rows = program.placement, rows
        self.lowered = any(a.op in FAR for row in rows for a in row)
        self.done: set[Key] = set()
        self.queues: dict[tuple, deque] = defaultdict(deque)
        self.arrived: set[tuple[int, int, str]] = set()
        self.inside: dict[int, Key] = {}  # rank -> what the first of a pair made, while the pair is not done
        self.added: dict[tuple[int, int, str], int] = defaultdict(lambda: -1)

    def ends(self) -> bool:
        at, moved = [0] * len(self.rows), True
        while moved:
            moved = False
            for rank, row in enumerate(self.rows):
                while at[rank] < len(row) and (verdict := self.execute(rank, row[at[rank]])) is not None:
                    if not verdict:
                        return False
                    at[rank], moved = at[rank] + 1, True
        return all(n == len(row) for n, row in zip(at, self.rows, strict=True))

    def execute(self, rank: int, a: Action) -> bool | None:
        """True: done. False: it must not be here. None: it waits."""
        if a.op in (Op.REDUCE, Op.STEP, Op.GATHER):
            return True
        if self.place.rank(a.stage, a.microbatch) != rank:
            return False
        return self.message(rank, a) if a.op in FAR else self.compute(rank, a)

    def has(self, stage: int, ops: tuple[Op, ...], microbatch: int) -> bool:
        return any((stage, op, microbatch) in self.done for op in ops)

    def message(self, rank: int, a: Action) -> bool:
        kind, far = a.op.name[-1], a.stage + FAR[a.op]
        other = self.place.rank(far, a.microbatch)
        if a.op.name.startswith("SEND"):
            if not self.has(a.stage, (Op.F,) if kind == "F" else GRADIENT, a.microbatch):
                return False
            channel, message = (rank, other, kind), (far, a.microbatch)
            self.queues["sent", channel].append(message)
        else:
            channel = (other, rank, kind)
            self.queues["posted", channel].append((a.stage, a.microbatch))
        sent, posted = self.queues["sent", channel], self.queues["posted", channel]
        while sent and posted:
            message = sent.popleft()
            if message != posted.popleft():
                return False
            self.arrived.add((*message, kind))
        return True

    def compute(self, rank: int, a: Action) -> bool | None:
        if a.op is not Op.F and not self.has(a.stage, (Op.I,) if a.op is Op.W else (Op.F,), a.microbatch):
            return False
        if a.op is not Op.W and not self.fed(rank, a):
            return None
        for group in ("BI", "BW"):
            if a.op.name in group:
                if self.added[rank, a.stage, group] > a.microbatch:
                    return False
                self.added[rank, a.stage, group] = a.microbatch
        self.done.add((a.stage, a.op, a.microbatch))
        self.inside.pop(rank, None)
        if a.fused:
            self.inside[rank] = (a.stage, a.op, a.microbatch)
        return True

    def fed(self, rank: int, a: Action) -> bool:
        """Whether the neighbour's activation or gradient is there."""
        forward = a.op is Op.F
        far = a.stage + (-1 if forward else 1)
        if not 0 <= far < self.place.stages:
            return True
        if self.lowered and self.place.rank(far, a.microbatch) != rank:
            return (a.stage, a.microbatch, "F" if forward else "B") in self.arrived
        left = all(at == rank or key[::2] != (far, a.microbatch) for at, key in self.inside.items())
        return left and self.has(far, (Op.F,) if forward else GRADIENT, a.microbatch)


def forms(program: Program) -> list[Program]:
    half = [lower(program, reduce=r, step=s) for r in (False, True) for s in (False, True)]
    return [program, *half, lower(program, reduce=True, step=True, gather=True)]


@given(st.one_of(scheduled(), executed()))
@pytest.mark.slow
def test_valid_programs_are_accepted_in_every_form(program):
    for form in forms(program):
        assert runs(form)
        verify(form)


def mutate(program: Program, rng: random.Random) -> Program:
    """Drop, duplicate, swap (within or across ranks), shift within its rank, or move to another rank."""
    rows = [list(program.actions(r)) for r in range(program.ranks)]
    filled = [r for r in range(program.ranks) if rows[r]]
    r, q = rng.choice(filled), rng.choice(filled)
    i, j = rng.randrange(len(rows[r])), rng.randrange(len(rows[q]))
    how = rng.choice(["drop", "duplicate", "swap", "cross", "shift", "move"])
    if how == "drop":
        del rows[r][i]
    elif how == "duplicate":
        rows[q].insert(j, rows[r][i])
    elif how == "swap":
        k = rng.randrange(len(rows[r]))
        rows[r][i], rows[r][k] = rows[r][k], rows[r][i]
    elif how == "cross":
        rows[r][i], rows[q][j] = rows[q][j], rows[r][i]
    elif how == "shift":
        rows[r].insert(rng.randrange(len(rows[r])), rows[r].pop(i))
    else:
        rows[rng.randrange(program.ranks)].insert(0, rows[r].pop(i))
    return Program.of(program.name, program.placement, program.microbatches, rows)


def arrow_points_at(message: str) -> str:
    """The cell of the grid above the arrow."""
    lines = message.splitlines()
    (arrow,) = [k for k, line in enumerate(lines) if line.strip() == "^"]
    return lines[arrow - 1][lines[arrow].index("^") :].split()[0].rstrip("&")


@given(st.one_of(scheduled(), executed()), st.integers(0, 5), st.integers(0, 2**32), st.integers(1, 2))
def test_a_mutation_is_rejected_by_name_or_equivalent(program, form, seed, times):
    rng = random.Random(seed)
    mutant = forms(program)[form]
    for _ in range(times):
        if len(mutant):
            mutant = mutate(mutant, rng)
    if runs(mutant):
        verify(mutant)
        return
    with pytest.raises(InvalidProgram) as refused:
        verify(mutant)
    message = str(refused.value)
    assert refused.value.action in message
    assert refused.value.blocker in message
    assert "rank 0" in message
    if any(line.strip() == "^" for line in message.splitlines()):
        assert arrow_points_at(message) == refused.value.action


def parse(text: str, ranks: int = 2) -> Program:
    return from_csv(text, Placement.linear(ranks))


@pytest.mark.parametrize(
    ("rows", "action", "blocker", "sentence"),
    [
        ("0F0,0B0\n1F0", "0B0", "1B0", "0B0 lacks 1B0, which is missing on rank 1"),
        ("0F0\n1F0,1B0", "0F0", "0B0", "0F0 lacks 0B0, which is missing on rank 0"),
        ("0B0\n1F0,1B0", "1F0", "0F0", "1F0 lacks 0F0"),
        ("0F0,0B0\n1F0,1F0,1B0", "1F0", "1F0", "1F0 is listed again: 1F0 stands at position 0 of rank 1"),
        ("0F0,1B0\n1F0,0B0", "1B0", "stage 1 on rank 1", "1B0 is misplaced"),
        ("0B0,0F0\n1F0,1B0", "0B0", "0F0", "0B0 needs 0F0, which comes only later, at position 1 of rank 0"),
        ("0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1", "0B1", "0B0", "0B1 must come after 0B0"),
        ("0F0,0F1,0I0,0I1,0W1,0W0\n1F0,1F1,1B0,1B1", "0W1", "0W0", "0W1 must come after 0W0"),
        ("0F0,0B0\n1F0,1I0", "1I0", "1W0", "1I0 lacks 1W0"),
        ("0F0,0B0\n1F0,1W0", "1W0", "1I0", "1W0 lacks 1I0"),
        ("0F0,0B0\n1F0,1B0,1W0", "1W0", "1B0", "1W0 repeats a part of 1B0"),
        ("0F0,0B0\n1F0,1W0,1I0", "1W0", "1I0", "1W0 needs 1I0"),
        ("0F0,0F1\n1F0,1B1", "1B1", "1F1", "1B1 lacks 1F1"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "0B0", "1B0", "0B0 waits for 1B0, which rank 1 lists behind 1F1"),
        ("0F0,0SEND_F0\n1F0", "1F0", "1RECV_F0", "1F0 lacks 1RECV_F0"),
        ("0F0\n1RECV_F0,1F0", "1RECV_F0", "0SEND_F0", "1RECV_F0 lacks 0SEND_F0"),
        ("0SEND_F0,0F0\n1RECV_F0,1F0", "0SEND_F0", "0F0", "0SEND_F0 needs 0F0"),
        ("0F0,0SEND_F0\n1F0,1RECV_F0", "1F0", "1RECV_F0", "1F0 needs 1RECV_F0"),
        ("0F0,0SEND_F0\n1RECV_F0,1F0,1SEND_F0", "1SEND_F0", "no other rank", "nothing crosses there"),
        (
            "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1",
            "1RECV_F1",
            "0SEND_F0",
            "1RECV_F1 would receive what 0SEND_F0 at position 1 of rank 0 sends",
        ),
        ("0F0,0B0,0STEP\n1F0,1B0", "1B0", "STEP", "1B0 of rank 1 is not followed by a STEP"),
        ("0F0,0STEP,0B0\n1F0,1B0,1STEP", "0STEP", "0B0", "0STEP must be the last"),
        ("0F0,0B0,0STEP,0STEP\n1F0,1B0,1STEP", "0STEP", "0STEP", "one too many"),
        ("0F0,0STEP\n1F0,1STEP", "0STEP", "no backward", "no gradients to work on"),
        ("0F0,0B0,0REDUCE_GRAD\n1F0,1B0", "1B0", "1REDUCE_GRAD", "1B0 lacks 1REDUCE_GRAD"),
        ("0F0,0B0,0REDUCE_GRAD\n1F0,1REDUCE_GRAD,1B0", "1REDUCE_GRAD", "1B0", "before the gradients are complete"),
        ("0F0,0REDUCE_GRAD\n1F0", "0REDUCE_GRAD", "no backward", "no gradients to work on"),
        ("0F0,0B0,0STEP,0GATHER\n1F0,1B0,1STEP", "1STEP", "1GATHER", "1STEP lacks 1GATHER after it, on rank 1"),
        ("0F0,0B0,0GATHER,0STEP\n1F0,1B0,1STEP,1GATHER", "0GATHER", "0STEP", "before the parameters are updated"),
        ("0F0,0B0,0GATHER\n1F0,1B0,1GATHER", "0GATHER", "STEP", "it needs STEP"),
        ("0F0,0B0,0STEP,0GATHER,0GATHER\n1F0,1B0,1STEP,1GATHER", "0GATHER", "0GATHER", "one too many"),
        ("0F0,0B0,0STEP0,0GATHER\n1F0,1B0,1STEP0", "0GATHER", "its versions", "updates are asynchronous"),
        ("0F0,0B0,2F0\n1F0,1B0", "2F0", "2 stages x 1 micro-batches", "not an action of a program of 2 stages"),
        ("0F0,0B0,0STEP0\n1F0,1B0", "1B0", "1STEP0", "1B0 lacks 1STEP0 after it, on rank 1"),
        ("0F0,0B0,0STEP0\n1F0,1B0,1STEP", "1STEP", "2 stages x 1 micro-batches", "not an action of a program"),
    ],
)
def test_what_is_wrong_is_said(rows, action, blocker, sentence):
    with pytest.raises(InvalidProgram) as refused:
        verify(parse(rows))
    assert (refused.value.action, refused.value.blocker) == (action, blocker)
    assert sentence in str(refused.value)
    assert arrow_points_at(str(refused.value)) == action


def test_a_deadlock_shows_the_whole_circle():
    """Rank 0 wants the gradient of 0 before it sends 1; rank 1 wants 1 before it makes the gradient of 0."""
    with pytest.raises(InvalidProgram) as refused:
        verify(parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"))
    assert str(refused.value) == (
        "program csv is invalid. rank 0, position 1: deadlock: 0B0 waits for 1B0, which rank 1 lists behind 1F1; "
        "1F1 waits for 0F1, which rank 0 lists behind 0B0\n\n"
        "rank 0 | 0F0 0B0 0F1 0B1\n"
        "             ^\n"
        "rank 1 | 1F0 1F1 1B0 1B1\n"
    )


def test_sends_that_cross_do_not_block():
    """Each rank sends before it receives: a deadlock where a send waits for its receive, not here."""
    placement = Placement(2, ((0, 1), (1, 0)), (0, 1))
    text = "0F0,0SEND_F0,1RECV_F1,1F1\n0F1,0SEND_F1,1RECV_F0,1F0\n"
    program = from_csv(text, placement)
    verify(program)
    with pytest.raises(InvalidProgram, match="1F0"):
        verify(from_csv(text.replace("1RECV_F0,", ""), placement))


@pytest.mark.parametrize("rows", ["(0F0;0F1)OVERLAP_F_B\n", "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"])
def test_overlapped_pairs_are_verified_as_two_actions(rows):
    program = from_csv(rows)
    verify(program)
    assert [str(action) for action in program.actions(0) if action.fused] in (["0F0"], ["0F1"])


def test_an_overlapped_pair_needs_both_its_halves():
    rows = [[Action(0, Op.F, 0, fused=True)], [Action(1, Op.F, 0)]]
    with pytest.raises(InvalidProgram, match=r"0F0 is to overlap .* but the end of the row comes next"):
        verify(Program.of("half", Placement.linear(2), 1, rows))
    rows = [[Action(0, Op.F, 0, fused=True), Action(0, Op.SEND_F, 0)], [Action(1, Op.RECV_F, 0), Action(1, Op.F, 0)]]
    with pytest.raises(InvalidProgram, match=r"0F0 is to overlap .* but 0SEND_F0 comes next"):
        verify(Program.of("half", Placement.linear(2), 1, rows))


def test_a_row_for_every_rank():
    program = build("gpipe", 2, 2)
    with pytest.raises(InvalidProgram, match=r"1 rows for 2 ranks"):
        verify(Program("short", program.placement, 2, program.rows[:1]))


@given(executed())
def test_peaks_count_what_a_backward_still_needs(program):
    for rank, peak in enumerate(peak_in_flight(program)):
        alive, most = set(), 0
        for a in program.actions(rank):
            if a.op is Op.F:
                alive.add((a.stage, a.microbatch))
            elif a.op in (Op.B, Op.I):
                alive.remove((a.stage, a.microbatch))
            most = max(most, len(alive))
        assert peak == most
    assert peak_in_flight(lower(program, reduce=True, step=True)) == peak_in_flight(program)


def test_long_programs_stay_readable_in_a_refusal():
    program = build("1f1b", 64, 200)
    row = program.rows[40].copy()
    row[[150, 152]] = row[[152, 150]]
    broken = Program("broken", program.placement, 200, (*program.rows[:40], row, *program.rows[41:]))
    with pytest.raises(InvalidProgram) as refused:
        verify(broken)
    assert max(map(len, str(refused.value).splitlines()[1:])) <= 120
    assert arrow_points_at(str(refused.value)) == refused.value.action
    assert len(str(refused.value).splitlines()) < 45


@given(scheduled())
def test_compute_only_programs_list_only_computations(program):
    assert all(a.op in COMPUTE for r in range(program.ranks) for a in program.actions(r))
