"""The teachers of a run: they score the policy's tokens, in this process or on a server.

    rows of "sum"    ->  teacher "maths"   a decoder   states before each token, once per unique token
    rows of "sort"   ->  teacher "code"    a server    log-probs of the tokens, and of its likeliest ones

A teacher may read another prompt than the policy (`teacher_prompt`): the same tokens follow a second root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graft.algos.batch import Batch
from graft.algos.kl import compared
from graft.engine.remote.prompt_logprobs import PromptScorer
from graft.models.divergence import TeacherCandidates, TeacherComparison, TeacherPart, TeacherStates
from graft.models.tree.forest import Forest
from graft.models.tree.packing import response
from graft.train.learner import Learner
from graft.train.teachers.teacher_prompt import TeacherPrompt
from graft.types import Task, Trajectory

POLICY, REFERENCE = "policy", "reference"
"""Teachers that are the policy itself: as it is, and as RL started or `algo.reference_sync` made it."""


@dataclass(slots=True)
class Teachers:
    """The teachers by name, and which of them a row has."""

    models: Mapping[str, Any]
    """Frozen decoders of this process; None for the policy itself and for its reference."""
    servers: Mapping[str, PromptScorer]
    choose: Callable[[Task], str]
    """The name of a task's teacher."""
    comparison: TeacherComparison | None = None
    """How distributions are compared; None: only the sampled tokens are scored."""
    needs_logprobs: bool = True
    """Whether log-probs of the sampled tokens are read by a credit or a loss."""
    prompt: TeacherPrompt | None = None
    """What the teachers read in place of the policy's prompt; None: the same."""

    def annotate(self, learner: Learner, batch: Batch) -> dict[str, Tensor]:
        """The fields of the batch that teachers fill before an update."""
        views = self._teacher_views(batch.trajectories)
        has_teacher = torch.tensor([view is not None for view in views], dtype=torch.bool)
        found: dict[str, Tensor] = {"has_teacher": has_teacher}
        held = batch.replace(has_teacher=has_teacher)
        held = held.replace(mask=compared(held))
        logprobs = batch.zeros()
        for name, rows in self._groups(batch.trajectories, views).items():
            some = [view for i in rows if (view := views[i]) is not None]
            index = torch.tensor(rows)
            theirs = held.rows(index).replace(trajectories=some)
            if name in self.servers:
                found |= self._ask(learner, name, theirs, index, logprobs, found)
            elif self.needs_logprobs:
                with self._open(learner, name) as (model, allowed):
                    logprobs[index] = learner.over_micros(
                        theirs,
                        lambda f: f.logprobs(model, learner.temperature, allowed)[0],
                    )
        if not self.needs_logprobs:
            return found
        if learner.policy.shape.extra:  # a teacher's log-probs are of tokens alone
            found["vocab_logprobs"] = learner.over_micros(
                held, lambda f: f.vocab_logprobs(*learner.scoring)[2]
            )
        return found | {"teacher_logprobs": logprobs}

    def comparing(
        self, learner: Learner, forest: Forest, micro: Batch
    ) -> Callable[[Tensor, Tensor], Tensor] | None:
        """What compares the student's distributions in a micro-batch with the teachers'; see
        `Decoder.action_logprobs`."""
        if (how := self.comparison) is None:
            return None
        views = self._teacher_views(micro.trajectories)
        parts = [
            self._candidates(forest, rows, micro)
            if name in self.servers
            else self._states(learner, name, forest, rows, views, micro)
            for name, rows in self._groups(micro.trajectories, views).items()
        ]
        shape = micro.mask.shape
        how = replace(how, allowed=forest.table(how.allowed, learner.policy.shape.head_rows))
        return lambda hidden, weight: how.grid(hidden, weight, parts, shape)

    def _teacher_views(self, trajectories: Sequence[Trajectory]) -> list[Trajectory | None]:
        """The rows as their teachers read them; None: nothing to read beyond what the policy reads."""
        return list(trajectories) if self.prompt is None else self.prompt.rewritten(trajectories)

    def _groups(
        self, trajectories: Sequence[Trajectory], views: Sequence[Trajectory | None]
    ) -> dict[str, list[int]]:
        """Row numbers by teacher, of rows that have one."""
        groups: dict[str, list[int]] = {}
        for number, (row, view) in enumerate(zip(trajectories, views, strict=True)):
            if view is not None:
                groups.setdefault(self.choose(row.task), []).append(number)
        return groups

    def _open(
        self, learner: Learner, name: str
    ) -> AbstractContextManager[tuple[Any, Tensor | None]]:
        """The model of a teacher, and what it may choose: vocabulary tokens only."""
        if name == REFERENCE and self.models[name] is None:
            return learner.open_reference()
        own = self.models[name]
        return _model(learner, learner.policy if own is None else own)

    def _states(
        self,
        learner: Learner,
        name: str,
        forest: Forest,
        rows: Sequence[int],
        views: Sequence[Trajectory | None],
        micro: Batch,
    ) -> TeacherPart:
        """The hidden states of a teacher in this process, one forward pass over its unique tokens."""
        index = torch.tensor(rows)
        mask = compared(micro).cpu()[index]
        some = [view for i in rows if (view := views[i]) is not None]
        with self._open(learner, name) as (model, _), torch.no_grad():
            own = Forest(some, mask, learner.policy.device)
            hidden, weight = model.states_before(own)
            weight = weight.clone() if name == REFERENCE and learner.lora is not None else weight
        cells = _cells(index, mask, micro.mask.shape[1]).to(hidden.device)
        student = forest.slots_NT.flatten()[cells]
        teacher = own.slots_NT[mask.to(hidden.device)]
        # a token that rows share is one pair, unless their teachers read different prompts
        keys, pair = torch.unique(student * (len(hidden) + 1) + teacher, return_inverse=True)
        at, theirs = keys // (len(hidden) + 1), keys % (len(hidden) + 1)
        states = TeacherStates(hidden.index_select(0, theirs), weight)
        return TeacherPart(cells, pair, at, forest.modes[at], states)

    def _candidates(self, forest: Forest, rows: Sequence[int], micro: Batch) -> TeacherPart:
        """The likeliest tokens that a server gave."""
        index = torch.tensor(rows)
        mask = compared(micro).cpu()[index]
        device = forest.slots_NT.device
        cells = _cells(index, mask, micro.mask.shape[1]).to(device)
        student = forest.slots_NT.flatten()[cells]
        ids = micro.need("teacher_top_ids", "a server gives them").flatten(0, 1)[cells]
        logprobs = micro.need("teacher_top_logprobs", "a server gives them").flatten(0, 1)[cells]
        pair = torch.arange(len(cells), device=device)
        return TeacherPart(
            cells, pair, student, forest.modes[student], TeacherCandidates(ids, logprobs)
        )

    def _ask(
        self,
        learner: Learner,
        name: str,
        held: Batch,
        index: Tensor,
        logprobs: Tensor,
        found: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Let a server score this process's share of its rows; others' are added."""
        rows = held.trajectories
        top_k = 0 if self.comparison is None else self.comparison.top_k
        shape = (*logprobs.shape, top_k)
        ids = found.get("teacher_top_ids", torch.zeros(shape, dtype=torch.long))
        tops = found.get("teacher_top_logprobs", torch.zeros(shape))
        mine = learner.own_rows(held)
        scored = self.servers[name].score([rows[i].tokens for i in mine], top_k)
        grids = [
            held.zeros(),
            torch.zeros(len(rows), *shape[1:]),
            torch.zeros(len(rows), *shape[1:]),
        ]
        for number, row in zip(mine, scored, strict=True):
            first = len(rows[number].tokens) - sum(map(len, response(rows[number])))
            count = len(row.logprobs) - first
            grids[0][number, :count] = torch.tensor(row.logprobs[first:])
            if top_k:
                grids[1][number, :count] = torch.tensor(row.ids[first:], dtype=torch.float32)
                grids[2][number, :count] = torch.tensor(row.tops[first:])
        for grid in grids:
            learner.complete(grid)
        logprobs[index] = torch.where(held.mask, grids[0], 0.0)
        if not top_k:
            return {}
        ids, tops = ids.clone(), tops.clone()
        ids[index], tops[index] = grids[1].long(), grids[2]
        return {"teacher_top_ids": ids, "teacher_top_logprobs": tops}


@contextmanager
def _model(learner: Learner, model: Any) -> Iterator[tuple[Any, Tensor | None]]:
    yield model, learner.allowed_tokens(model)


def _cells(index: Tensor, mask: Tensor, width: int) -> Tensor:
    """Cells of the grid, row by row, of the rows `index` where `mask` is set."""
    row, column = mask.nonzero(as_tuple=True)
    return index[row] * width + column
