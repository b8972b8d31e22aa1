"""All tables, by the name of their command."""

from __future__ import annotations

from bench.papers import (
    cornstarch_attention,
    cornstarch_frozen,
    cornstarch_november,
    cornstarch_placements,
    disttrain,
    disttrain_preprocessing,
    entrain_ratios,
    entrain_schedules,
    oobleck_failures,
    oobleck_planning,
    orchmllm,
    own_layouts,
)

TABLES = {
    table.name: table
    for table in (
        *entrain_ratios.TABLES,
        *entrain_schedules.TABLES,
        *oobleck_failures.TABLES,
        *oobleck_planning.TABLES,
        *orchmllm.TABLES,
        *disttrain.TABLES,
        *disttrain_preprocessing.TABLES,
        *cornstarch_placements.TABLES,
        *cornstarch_attention.TABLES,
        *cornstarch_frozen.TABLES,
        *cornstarch_november.TABLES,
        *own_layouts.TABLES,
    )
}
