"""Step tables: assignment of samples to chunks, from lengths and costs alone.

- `table`: lengths to a StepTable. `dispatch`: samples to replicas. `assign`: samples to microbatches. `work`: their
  costs.
- `batch`: the global batch. `ahead`: tables of later steps. `lists`: cached schedules by form of table.
- `deals`: rows to context-parallel ranks. `needs`: parts of samples that each rank needs. `sizes`: sizes of chunks.
"""
