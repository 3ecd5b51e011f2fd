"""Collectors turn tasks into episodes, all with the interface of `collector.py`.

SyncCollector           sync.py                         on this thread: sampling and learning take turns
AsyncCollector          background.py                   on a thread, while this one learns
DistributedCollector    train/distributed/collector.py  over the processes of torchrun
RayCollector            cluster/collector.py            over the workers of a Ray cluster
"""
