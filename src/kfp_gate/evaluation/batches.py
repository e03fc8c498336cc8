"""Running a model over many images: bounded memory, one result per image, in order.

On a CPU every image is its own forward pass, several at a time in threads of one core each. A convolution's kernels
add in another order at another batch size, place in the batch or thread count, which moves scores by 1e-8. So
computed, neither batch size nor shards nor cores change a bit, and it is as fast. On a GPU images go in batches, which
are halved when memory runs out.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

from kfp_gate.errors import Broken

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


def in_order(
    work: Callable[[T], R], items: Sequence[T], *, threads: int, initializer: Callable[[], None]
) -> Iterator[R]:
    """`work` on every item in threads, results in order, at most three per thread in flight."""
    with ThreadPoolExecutor(threads, "kfp-gate-evaluate", initializer=initializer) as pool:
        waiting: deque[Future[R]] = deque()
        rest = iter(items)
        try:
            for item in islice(rest, 3 * threads):
                waiting.append(pool.submit(work, item))
            while waiting:
                result = waiting.popleft().result()
                for item in islice(rest, 1):
                    waiting.append(pool.submit(work, item))
                yield result
        finally:
            # A failure or an abandoned iterator must not wait for work that nobody wants.
            for future in waiting:
                future.cancel()


class Halving:
    """Forward passes in batches; a batch that does not fit is halved, said, and stays halved.

    Args:
        forward: a (B, 3, S, S) tensor in, a tensor with B rows out.
        batch: images per pass, at first.
    """

    def __init__(self, forward: Callable[[Any], Any], batch: int) -> None:
        self._forward = forward
        self.batch = batch

    def __call__(self, images: Any) -> Any:
        """Outputs of a (B, 3, S, S) tensor, whatever B.

        Raises:
            Broken: not even one image fits.
        """
        import torch

        outputs: list[Any] = []
        start = 0
        while start < len(images):
            refusal = ""
            try:
                outputs.append(self._forward(images[start : start + self.batch]))
                start += self.batch
            except torch.OutOfMemoryError as error:
                refusal = str(error).strip().splitlines()[0] if str(error).strip() else "no detail"
            # Outside the handler: while an exception is handled its frames hold the tensors of the failed pass.
            if refusal and self.batch == 1:
                raise Broken(
                    f"out of GPU memory with one image ({refusal})",
                    expected="memory for one image of this size", where="evaluation",
                    next_step="lower image_size, free the GPU, or choose a GPU with more memory",
                )  # fmt: skip
            if refusal:
                self.batch //= 2
                torch.cuda.empty_cache()
                log.warning("out of GPU memory: evaluation goes on with batches of %d images", self.batch)
        return torch.cat(outputs)
