"""Work beside collectives: which step runs when, and that nothing can move it elsewhere."""

import jax
import jax.numpy as jnp

from jaxserve.model.ffn.beside import Beside


class Logged(Beside):
    """Three steps from the value 7, beside a collective that adds 1; `log` says what ran when."""

    def __init__(self):
        self.log = []
        super().__init__(jnp.array(7), [self.step(number) for number in (1, 2, 3)])

    def step(self, number):
        def run(value):
            self.log.append(f"step {number}")
            return value * 10 + number

        return run

    def moves(self, number, **options):
        def collective(array):
            self.log.append("moves")
            return array + 1

        return self.during(jnp.array(number), collective, **options)


def test_a_step_beside_each():
    beside = Logged()
    assert [beside.moves(number) for number in (1, 2)] == [2, 3]
    assert beside.result() == 7123
    assert beside.log == ["moves", "step 1", "moves", "step 2", "step 3"]


def test_all_that_is_left_beside_the_last():
    beside = Logged()
    beside.moves(1)
    beside.moves(2, last=True)
    assert beside.log == ["moves", "step 1", "moves", "step 2", "step 3"]
    beside.moves(3)
    assert beside.log[5:] == ["moves"]
    assert beside.result() == 7123


def test_steps_are_left_for_others():
    """The first of three runs beside a collective that leaves two, and none beside the next."""
    beside = Logged()
    for _ in range(2):
        beside.moves(1, spared=2)
    assert beside.log == ["moves", "step 1", "moves"]
    beside.moves(2, spared=1)
    assert beside.log[3:] == ["moves", "step 2"]
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
