"""The meter of overtaking against a count for each job on its own."""

from hypothesis import given
from hypothesis import strategies as st

from services.simulate.overtakes import PassedTokens


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=40), st.data())
def test_the_most_that_any_job_was_passed_by(jobs: list[tuple[int, bool]], data: st.DataObject) -> None:
    meter, waiting, passed, arrived = PassedTokens(), [], dict.fromkeys(range(len(jobs)), 0), 0
    while waiting or arrived < len(jobs):
        if arrived < len(jobs) and (not waiting or data.draw(st.booleans())):
            meter.arrive("standard", "acme", arrived, is_open=jobs[arrived][1])
            waiting.append(arrived)
            arrived += 1
            continue
        chosen = data.draw(st.sampled_from(waiting))
        waiting.remove(chosen)
        meter.admit("standard", "acme", chosen, jobs[chosen][0])
        for other in waiting:
            passed[other] += jobs[chosen][0] if other < chosen else 0
    assert meter.most() == {"standard": max((passed[job] for job in passed if jobs[job][1]), default=0)}
