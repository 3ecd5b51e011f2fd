#!/bin/sh
sh worker.sh > /dev/null 2>&1 &
