"""What state machines over a node share: things that happen inside a call of a tier, and runs that repeat."""

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine


class Interleaved(RuleBasedStateMachine):
    """Whatever it is asked to do may happen at once or in the middle of the tier's next call, which may fail, too.

    `inside` belongs before the calls of its `ScriptedBackend`. `faults`: what each makes of a call, by name, from its
    ids; `fault` is the one of the day.
    """

    def __init__(self, faults):
        super().__init__()
        self._faults = faults
        self.fault = None
        self.meanwhile = []

    def inside(self, ids):
        """In the middle of a call of the tier: something else happens, then the fault of the day."""
        actions, self.meanwhile = self.meanwhile, []
        for action in actions:
            action()
        return self.failing(ids)

    def failing(self, ids):
        """The fault of the day and nothing else; None: there is none."""
        return None if self.fault is None else self._faults[self.fault](ids)

    def soon(self, later, action):
        """Now, or in the middle of the next call of the tier."""
        if later:
            self.meanwhile.append(action)
        else:
            action()


def repeatable(max_examples):
    """So many runs of 40 steps, the same ones each time."""
    return settings(
        max_examples=max_examples,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
