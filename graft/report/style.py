"""How a report looks, by day and by night and on paper. The page asks for nothing outside itself."""

from __future__ import annotations

CSS = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #5b6675; --paper: #ffffff; --card: #f5f7f9;
  --rule: #d5dbe2; --line: #1266b0; --pale: #9cc3e6; --good: #1a7f37; --bad: #b42318; --warn: #9a6700;
  --task: #5b6675; --policy: #1a7f37; --env: #0b6e8a; --tool: #7a3fb0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ef; --dim: #9aa5b3; --paper: #12161b;
  --card: #1b2128; --rule: #333d48; --line: #6cb6ff; --pale: #31567c; --good: #57c777; --bad: #ff8278;
  --warn: #e3b341; --task: #9aa5b3; --policy: #57c777; --env: #5cc8e6; --tool: #c59bf0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 70rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; overflow-wrap: anywhere; }
h2 { margin: 2.2rem 0 .6rem; font-size: 1.2rem; border-bottom: 1px solid var(--rule); }
h3 { margin: 1.4rem 0 .4rem; font-size: 1rem; }
.result { font-size: 1.25rem; margin: .4rem 0; }
.facts, .note, .about, .wanted { color: var(--dim); }
.status { padding: .1rem .5rem; border-radius: 1rem; border: 1px solid var(--rule); font-size: .9rem; }
.status.running { color: var(--line); } .status.done { color: var(--good); }
.status.failed { color: var(--bad); } .status.stopped { color: var(--warn); }
.curves { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(19rem, 1fr)); }
figure { margin: 0; padding: .7rem; background: var(--card); border-radius: .5rem; }
figcaption .last { float: right; font-variant-numeric: tabular-nums; }
figure .about { display: block; font-size: .85rem; }
svg { display: block; width: 100%; height: auto; }
svg .grid { stroke: var(--rule); } svg text { fill: var(--dim); font: 12px system-ui, sans-serif; }
svg .y { text-anchor: end; } svg .x { text-anchor: middle; }
svg polyline { fill: none; stroke-linejoin: round; }
svg .band { fill: var(--pale); opacity: 0.45; }
svg .raw { stroke: var(--pale); stroke-width: 1; }
svg polyline.mean { stroke: var(--line); stroke-width: 2; } svg circle.mean { fill: var(--line); }
svg .mark { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 3 3; }
.wide { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--rule); overflow-wrap: break-word; }
td code { display: inline-block; min-width: 6rem; overflow-wrap: anywhere; }
thead th { color: var(--dim); font-weight: normal; }
tbody th { font-weight: 500; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
details { margin: .4rem 0; } summary { cursor: pointer; }
figure details { font-size: .85rem; color: var(--dim); }
.up, .best { color: var(--good); } .down, .worst, .alarm, .error { color: var(--bad); }
.warn { color: var(--warn); }
.talk { margin: .4rem 0 1rem; padding: .2rem .8rem; background: var(--card); border-radius: .5rem; }
.turn { display: grid; grid-template-columns: 4rem 1fr; gap: 0 .6rem; padding: .3rem 0; }
.turn pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: plaintext; }
.turn .call, .turn .error { grid-column: 2; font-size: .85rem; }
.turn .call { color: var(--tool); }
.who { font-weight: 600; font-size: .85rem; }
.task .who, .task pre { color: var(--task); } .policy .who, .policy pre { color: var(--policy); }
.env .who, .env pre { color: var(--env); } .tool .who, .tool pre { color: var(--tool); }
.tool pre { border-left: 3px solid var(--tool); padding-left: .5rem; }
.context { color: var(--dim); border-top: 1px dashed var(--rule); }
@media print { body { max-width: none; } figure, .talk { break-inside: avoid; } }
"""
