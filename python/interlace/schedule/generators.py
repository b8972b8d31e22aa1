"""All generators by their names in configs and in `parallelize`."""

from __future__ import annotations

from collections.abc import Callable

from interlace.schedule.automatic import automatic
from interlace.schedule.gpipe import gpipe
from interlace.schedule.one_f_one_b import interleaved, one_f_one_b
from interlace.schedule.schedule import Schedule
from interlace.schedule.zero_bubble import zb_h1, zb_h2, zb_v

GENERATORS: dict[str, Callable[..., Schedule]] = {
    "1f1b": one_f_one_b,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "auto": automatic,
}
