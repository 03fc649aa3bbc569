# Installs programs/ and the repository's units as the package does: `. "$payload/tools/install_programs.sh"`. For cases that need fail points.
# Copies: the service's user may not be let into the payload.
for name in pagedd pagedd-worker pagedd-gateway pagedctl; do install -m 755 "$payload/programs/$name" "/usr/bin/$name"; done
install -m 644 "$payload/systemd/pagedd.service" "$payload/systemd/pagedd.socket" /usr/lib/systemd/system/
install -m 644 "$payload/systemd/pagedd.sysusers" /usr/lib/sysusers.d/pagedd.conf
install -m 644 "$payload/systemd/pagedd.tmpfiles" /usr/lib/tmpfiles.d/pagedd.conf
systemd-sysusers pagedd.conf
systemd-tmpfiles --create pagedd.conf
systemctl daemon-reload
