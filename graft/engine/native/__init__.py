"""The engine that shares its weights with the trainer, in the same process.

Reading order: `pages` (memory), `tree` (who shares which pages), `scheduler` (what runs next),
`batch` and `attention` (one forward over all of it), `lanes` and `traffic` (decoding), `families`
and `layout` (their index arithmetic), `sampler`, `runner` (one step), `driver` (asyncio),
`context`, `engine`.
"""
