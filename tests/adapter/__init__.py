"""Each adapter against the real thing it speaks to: git, qemu-img, sshd on loopback, libvirt."""
