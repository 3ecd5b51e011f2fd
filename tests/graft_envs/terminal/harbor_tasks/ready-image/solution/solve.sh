#!/bin/sh
echo yes > answer.txt
