"""States across amendments: which amendments of a plan a state knows, and which are new to it."""

from penstock.errors import ResumeError
from penstock.loader.run import Run
from penstock.loader.state import State, identify_ledger
from penstock.order.plan import Plan
from penstock.order.steps import Steps


def check_ledger(run: Run, state: State) -> None:
    """Raise ResumeError unless a state belongs to a run whose plan may be amended after it.

    A state knows the amendments that its plan had when it was saved. All of them must still be
    there, and later ones must not begin before the position of the state.
    """
    amendments = run.plan.amendments if isinstance(run.plan, Plan) else ()
    known = state.get("ledger", {"amendments": 0})
    number = known.get("amendments") if isinstance(known, dict) else None
    if type(number) is not int or number < 0:
        raise ResumeError("This state has no valid ledger. Use the checkpoint before it.")
    if number > len(amendments):
        raise ResumeError(
            f"This checkpoint was saved by a run with {number:,} amendments, but the plan has "
            f"{len(amendments):,}. Restore the ledger beside the recipe, or amend the plan again "
            "in the same way."
        )
    before = [each.to_json() for each in amendments[:number]]
    if number and identify_ledger(before) != known:
        raise ResumeError(
            f"The first {number:,} amendments of this plan are not those of the checkpoint "
            f"(digest {str(known.get('digest'))[:8]} -> {identify_ledger(before)['digest'][:8]}). "
            "Amendments are only added, never changed. Restore the ledger beside the recipe."
        )
    position = int(state["position"])
    if number < len(amendments) and amendments[number].position < position:
        begin = amendments[number].position
        raise ResumeError(
            f"Amendment {number + 1:,} begins {_steps(run, begin)}, but this checkpoint was saved "
            f"{_steps(run, position)}, so its run has read other rows since. Resume from a "
            f"checkpoint at or before position {begin:,}, or amend from a later step."
        )


def _steps(run: Run, position: int) -> str:
    """Return a position in words, with the number of steps of this run before it."""
    steps = run.steps
    if steps.start > position:
        steps = Steps(run.steps.sizes[0])  # the run was resumed in the middle of a step
    return f"after {steps.at(position):,} steps (position {position:,})"
