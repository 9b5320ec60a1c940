"""Power-of-two block scales, as an observer of LLM Compressor.

An MXFP4 weight has one bit of mantissa and E4M3 has three, so under a block scale that is a power
of two most MXFP4 weights keep their value. Which ones: the scale of a block with absolute maximum
1.0 or 1.5 x 2^X is 2^(X-8), and the smallest step of E4M3 is 2^-9, so a weight keeps its value when
it is a multiple of 2^(X-17). All weights of a group of scale 2^e are multiples of 2^(e-1), hence
every weight of a block keeps its value when each of its groups that is not all zeros has
X - e <= 16. X is at most 2 above the largest e (6 = 1.5 x 2^2), so a spread of the exponents e of
14 or less is always enough. With a spread of 15, a block whose maximum is a 4 or a 6 under the
largest scale changes every 0.5 and 1.5 under the smallest (0.5 becomes zero); from 16 on, 1 and 3
go too, and so on.

Importing this module registers the observer.
"""

from __future__ import annotations

import torch
from compressed_tensors.registry import standardize_lookup_name
from llmcompressor.observers import Observer

#: The observer's name in LLM Compressor's registry.
POWER_OF_TWO = "kimi_k3_power_of_two"


class PowerOfTwoObserver(Observer):  # type: ignore[misc]
    """Observes -+448 x 2^k, with the smallest k that covers a block's absolute maximum.

    LLM Compressor divides by 448, E4M3's maximum, so the scale becomes exactly 2^k. For weights in
    bfloat16, float16 or float32, on any device, meta included.

    - A block of zeros observes 0; LLM Compressor then takes its own smallest scale.
    - NaN or Inf in a block, or a maximum above 448 x 2^k for the largest k that keeps this finite
      (1.75 x 2^127, in float16 1.75 x 2^15), give a scale that is not finite.
    - 2^k is never below the smallest positive number of the weight's dtype, where the division
      would give zero.
    """

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        """Takes what LLM Compressor observes, [1, block rows, block columns, weights a block].

        Sets `min_vals` and `max_vals`, both [block rows, block columns] in the weight's dtype.
        """
        low, high = observed.amin(dim=(0, -1)), observed.amax(dim=(0, -1))
        # float64 holds every step below exactly, for any weight of the dtypes above.
        amax = torch.maximum(-low, high).double()
        mantissa, _ = torch.frexp(amax)  # in [0.5, 1)
        cover = amax / mantissa * 0.875  # 448 = 0.875 x 2^9
        cover = torch.where(mantissa > 0.875, 2 * cover, cover)
        limits = torch.finfo(observed.dtype)
        cover = cover.clamp(min=448 * limits.smallest_normal * limits.eps)
        self.max_vals = torch.where(amax == 0, amax, cover).to(observed.dtype)
        self.min_vals = -self.max_vals


# The registry refuses a second class under one name: a reloaded module keeps the first.
if standardize_lookup_name(POWER_OF_TWO) not in Observer.registered_names():
    Observer.register(POWER_OF_TWO)(PowerOfTwoObserver)
