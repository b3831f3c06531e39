"""Work beside collectives: which step runs when, and that nothing can move it elsewhere."""

import jax
import jax.numpy as jnp

from jaxserve.model.ffn.beside import Beside


def steps(log):
    def step(number):
        def run(value):
            log.append(f"step {number}")
            return value * 10 + number

        return run

    return [step(number) for number in (1, 2, 3)]


def moving(log):
    def collective(array):
        log.append("moves")
        return array + 1

    return collective


def test_a_step_beside_each():
    log: list[str] = []
    beside = Beside(jnp.array(7), steps(log))
    assert beside.during(jnp.array(1), moving(log)) == 2
    assert beside.during(jnp.array(2), moving(log)) == 3
    assert beside.result() == 7123
    assert log == ["moves", "step 1", "moves", "step 2", "step 3"]


def test_all_that_is_left_beside_the_last():
    log: list[str] = []
    beside = Beside(jnp.array(7), steps(log))
    beside.during(jnp.array(1), moving(log))
    beside.during(jnp.array(2), moving(log), last=True)
    assert log == ["moves", "step 1", "moves", "step 2", "step 3"]
    beside.during(jnp.array(3), moving(log))
    assert log[5:] == ["moves"]
    assert beside.result() == 7123


def test_steps_are_left_for_others():
    """The first of three runs beside a collective that leaves two, and none beside the next."""
    log: list[str] = []
    beside = Beside(jnp.array(7), steps(log))
    for _ in range(2):
        beside.during(jnp.array(1), moving(log), spared=2)
    assert log == ["moves", "step 1", "moves"]
    beside.during(jnp.array(2), moving(log), spared=1)
    assert log[3:] == ["moves", "step 2"]
    assert beside.result() == 7123


def test_neither_waits_for_the_other_nor_leaves_it():
    """One barrier before both, and one behind: neither result is anyone else's before it."""

    def program(value, array):
        beside = Beside(value, [lambda value: value * 3])
        arrived = beside.during(array, lambda array: array + 5)
        return arrived, beside.result()

    names = [one.primitive.name for one in jax.make_jaxpr(program)(jnp.ones(3), jnp.ones(3)).eqns]
    assert names == ["optimization_barrier", "add", "mul", "optimization_barrier"]
    assert program(jnp.array(1.0), jnp.array(2.0)) == (7.0, 3.0)
