"""A walk over a flat step that calls a sharding's hooks beside the operators where PyTorch calls them.

The operators between are rewritten to read parameters where they lie at that moment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from memir.errors import InconclusiveError
from memir.ir.core import Value
from memir.parallel.accumulated import parts_of, without_additions
from memir.parallel.calls import Call, Pass
from memir.parallel.edit import Edit
from memir.parallel.groups import Group
from memir.parallel.placed import Placer
from memir.parallel.unsharded import Unsharded

Hook = Callable[[], None]


class Hooks:
    """Base of the two runtimes of fully sharded data parallelism; `source` is the file that runs the operators put in.

    `summed`: gradients of several micro-batches add up as they did, whole.
    """

    def __init__(self, edit: Edit, groups: dict[str, Group], source: str, *, summed: bool = False) -> None:
        self.edit, self.flow, self.groups = edit, edit.flow, groups
        members = [member for group in groups.values() for member in group.members]
        self.placer = Placer(edit, source=source)
        self.whole = Unsharded(edit, {m.parameter: m.value for m in members})
        gradients = [(m.gradient, m.value) for m in members if m.gradient is not None]
        self.parts = parts_of(edit.flow, gradients, summed=summed)

    def run(self, passes: Sequence[Pass]) -> None:
        """Walks over the step; afterwards `edit` has all changes."""
        hooks: dict[tuple[int, bool], list[Hook]] = defaultdict(list)
        walked = {phase for one in passes for phase in (one.forward, one.backward)}
        for one in passes:
            for call in one.calls:
                self._add(hooks, call, one)
            if one.backward:
                hooks[one.end, True].append(self.final_callback)
        without_additions(self.edit, self.parts.values())
        for position, phase in enumerate(self.flow.phase):
            for behind in (False, True):
                self.placer.position, self.placer.behind = position, behind
                for hook in hooks.get((position, behind), ()):
                    hook()
                if phase in walked and not behind:
                    self.whole.rewrite(position)
        self.placer.apply()

    def _add(self, hooks: dict[tuple[int, bool], list[Hook]], call: Call, one: Pass) -> None:
        """An outer module's hooks come before those of the modules in it, and after them when it is through."""
        group = self.groups.get(call.path) or Group(call.path, call.layer, ())
        hooks[call.first, False].append(lambda: self.pre_forward(group))
        hooks[call.last, True].insert(0, lambda: self.post_forward(group))
        begun = self.begin_of_backward(call)
        if begun is not None:
            hooks[begun, False].append(lambda: self.pre_backward(group))
        end = self.end_of_backward(group, call, one)
        if end is not None:
            hooks[end, True].insert(0, lambda: self.post_backward(group))

    def gradients(self, group: Group) -> list[Value]:
        """The whole gradients that the backward of now gives the trained members. InconclusiveError where one lacks."""
        phase = self.flow.phase[self.placer.position]
        found = []
        for member in group.trained:
            part = self.parts.get((phase, member.parameter))
            if part is None:
                raise InconclusiveError("a parameter has no gradient of its own shape in this backward", where=member.parameter)
            found.append(part.value)
        return found

    def begin_of_backward(self, call: Call) -> int | None:
        """The operator ahead of which the unit's pre_backward runs; None: nothing is differentiated."""
        return call.pre_backward

    def end_of_backward(self, group: Group, call: Call, one: Pass) -> int | None:
        """The operator behind which the unit's post_backward runs; None: it waits for the end of backward."""
        raise NotImplementedError

    def pre_forward(self, group: Group) -> None:
        """Ahead of a module's forward; a group without members is a module that holds no parameters itself."""
        raise NotImplementedError

    def post_forward(self, group: Group) -> None:
        """Behind a module's forward."""
        raise NotImplementedError

    def pre_backward(self, group: Group) -> None:
        """Where the gradient of its outputs is there."""
        raise NotImplementedError

    def post_backward(self, group: Group) -> None:
        """Where its parameters are not needed any more."""
        raise NotImplementedError

    def final_callback(self) -> None:
        """When autograd is through."""
        raise NotImplementedError
