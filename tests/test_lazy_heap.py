"""LazyHeap against a list that is sorted each time."""

from hypothesis import given
from hypothesis import strategies as st

from shmserve.lazy_heap import LazyHeap

STEPS = st.lists(st.tuples(st.sampled_from("pppdf"), st.integers(0, 5), st.integers(0, 9)))


class Item:
    """Something without an order or equality of its own."""


@given(STEPS)
def test_first_is_the_least_that_is_in_whatever_left_from_where(steps):
    items = [Item() for _ in range(10)]
    heap, model = LazyHeap(), {}
    for number, (what, key, index) in enumerate(steps):
        item = items[index]
        if what == "p":
            heap.put(key, item)
            model[item] = (key, number)
        elif what == "d":
            heap.discard(item)
            model.pop(item, None)
        elif model:
            least = min(model, key=model.__getitem__)
            assert heap.first() == (model[least][0], least)
        else:
            assert heap.first() is None
        assert len(heap) == len(model)


def test_who_left_is_not_kept_for_ever():
    heap = LazyHeap()
    stays = Item()
    heap.put(0, stays)
    for key in range(1, 10_000):
        item = Item()
        heap.put(key, item)
        heap.discard(item)
    assert len(heap) == 1 and len(heap._heap) < 100
    heap.discard(stays)
    assert heap.first() is None and not heap._heap
