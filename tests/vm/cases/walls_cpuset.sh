#!/bin/bash
# A tenant keeps to its cpuset, live; CPUs that are offline are left out and said to be, and none at all is refused. With all controllers walls are full.
# layer: tcg
# seconds: 600
# memory: 1536
# needs: programs tiny
. /run/payload/lib.sh
. /run/payload/tools/walls.sh
install -t /usr/bin "$payload"/programs/*
configure tiny " kv_memory: 1024 tokens" "cgroups: required"
start_pagedd
within 200 models_ready
equal "walls" full "$(pagedctl --json status | field 'v["walls"]["is"]')"
pagedctl metrics | grep -q '^pagedd_walls 1' || die "the gauge is not 1"

say "one CPU of two, live"
add_tenant a --cpuset 1
within 60 ready a
allowed() { sed -n 's/^Cpus_allowed_list:\t//p' "/proc/$(gateway a)/status"; }
equal "CPUs of the gateway" 1 "$(allowed)"
pagedctl tenant set a --cpuset 0 > /dev/null
equal "CPUs of the gateway" 0 "$(allowed)"
start_inside a sh -c 'while :; do :; done'
sleep 2
equal "the CPU of a spinner" 0 "$(cut -d' ' -f39 "/proc/$started/stat")"
kill -KILL "$started"

say "offline CPUs are left out, and said to be"
pagedctl tenant set a --cpuset 0-7 > /tmp/set
grep -q 'NOT ENFORCED  *cpuset.cpus: CPUs 2-7 are offline' /tmp/set || { cat /tmp/set; die "that some are left out is not said"; }
equal "CPUs of the gateway" 0-1 "$(allowed)"
echo 0 > /sys/devices/system/cpu/cpu1/online
refused "none of the CPUs 1 can be used: there are 0" tenant set a --cpuset 1
refused "none of the CPUs 5-9 can be used" tenant add c --cpuset 5-9
[ ! -e "$tenants/c" ] || die "a refused tenant left a cgroup"
equal "tenants" a "$(pagedctl --json tenant list | field '" ".join(t["name"] for t in v["tenants"])')"
echo 1 > /sys/devices/system/cpu/cpu1/online
pagedctl tenant set a --cpuset default > /dev/null
equal "CPUs of the gateway" 0-1 "$(allowed)"

say "what waited is measured"
[ "$(show a '["usage"]["pressure"]["cpu"]')" != None ] || say "this kernel measures no pressure"
pagedctl tenant show a
pagedctl tenant remove a --force
[ ! -e "$tenants/a" ] || die "its cgroup is there"
systemctl stop pagedd
[ ! -e "$service" ] || die "its cgroup is there"
journal_clean
