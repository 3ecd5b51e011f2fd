"""The engine that shares its weights with the trainer, in the same process.

Reading order: `pages` (memory), `tree` (who shares which pages), `scheduler` (what runs next),
`batch` and `attention` (one forward over all of it), `sampler`, `driver` (asyncio), `engine`.
"""
