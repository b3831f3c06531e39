"""Questions are a function of the seed."""

from jaxserve.chaos.questions import questions


def test_half_greedy_some_long_all_different():
    found = questions(3, 12, longest=40)
    assert found == questions(3, 12, longest=40)
    assert found != questions(4, 12, longest=40)
    assert len({question.prompt for question in found}) == 12
    assert [question.seed is None for question in found] == [True, False] * 6
    assert max(question.tokens for question in found) == 40
    assert all("\n" in question.prompt for question in found)


def test_questions_that_begin_with_a_system_prompt():
    found = questions(3, 40, longest=40, systems=2)
    assert len({question.prompt for question in found}) == 40
    begins = {question.prompt.splitlines()[0] for question in found}
    assert begins == {"# system 0", "# system 1"}
    assert [question.seed is None for question in found] == [True, False] * 20
    assert {question.tokens for question in found} == {4, 8, 16, 24}
    found = questions(3, 40, longest=40, vocab=90, systems=2)
    begins = {tuple(question.prompt[:16]) for question in found}
    assert len(begins) == 2
    assert min(len(question.prompt) for question in found) >= 16 + 7
