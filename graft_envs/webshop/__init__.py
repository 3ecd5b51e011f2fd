"""WebShop, `webshop:{train,test}-{html,text,text_rich}`: find and buy what an instruction asks for."""

from __future__ import annotations

from graft.envs.entry import EnvEntry

WEBSHOP: dict[str, EnvEntry] = {
    f"webshop:{split}-{mode}": EnvEntry(
        "graft_envs.webshop.env:WebShop", {"split": split, "observation_mode": mode}, turns=15
    )
    for split in ("train", "test")
    for mode in ("html", "text", "text_rich")
}
