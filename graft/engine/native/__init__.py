"""The engine that shares its weights with the trainer, in the same process.

Reading order: `pages` (memory), `tree` (who shares which pages), `scheduler` (what runs next),
`masks` (what may be drawn). Then, in plain PyTorch: `batch` and `attention` (one forward over all of
it), `lanes` and `traffic` (decoding), `families` and `layout` (their index arithmetic), `sampler`,
`runner` (one step). With kernels instead: `kernels`, `sharing` (pages read once), `lines` (rows on
the device), `rules` (a grammar there), `prompts`, `graphs`, `flight` (segments), `burst` (many
steps). At last `driver` (asyncio), `scoring` (without sampling), `context`, `engine`.
"""
