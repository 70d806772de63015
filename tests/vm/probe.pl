#!/usr/bin/perl
# Tries to reach places, all at once, and says of each on a line of its own whether anything came back.
# Arguments: KIND,HOST,PORT with KIND tcp, udp, icmp, dns or vsock; HOST may be an IPv6 address.
use strict;
use warnings;
use Socket qw(:DEFAULT inet_pton pack_sockaddr_in6 IPPROTO_ICMP);

use constant PATIENCE_S => 4;

sub address {
    my ($host, $port) = @_;
    return (PF_INET6, pack_sockaddr_in6($port, inet_pton(AF_INET6, $host))) if $host =~ /:/;
    return (PF_INET, pack_sockaddr_in($port, inet_aton($host) // die "no such name\n"));
}

sub checksum {
    my $sum = 0;
    $sum += $_ for unpack 'n*', $_[0];
    $sum = ($sum & 0xffff) + ($sum >> 16) for 1, 2;
    return ~$sum & 0xffff;
}

sub answered {
    my ($socket) = @_;
    my $set = '';
    vec($set, fileno($socket), 1) = 1;
    return 0 if select($set, undef, undef, PATIENCE_S) <= 0;
    return defined recv($socket, my ($data), 1500, 0);
}

sub reached {
    my ($kind, $host, $port) = @_;
    if ($kind eq 'vsock') {
        socket(my $socket, 40, SOCK_STREAM, 0) or return 0;
        return connect $socket, pack 'S x2 L L x4', 40, $port, $host;
    }
    my ($family, $to) = address($host, $port);
    if ($kind eq 'tcp') {
        socket(my $socket, $family, SOCK_STREAM, 0) or die "$!\n";
        return connect $socket, $to;
    }
    if ($kind eq 'icmp') {
        socket(my $socket, PF_INET, SOCK_RAW, IPPROTO_ICMP) or die "$!\n";
        my $body = pack 'C C n n n', 8, 0, 0, $$ & 0xffff, 1;
        substr($body, 2, 2) = pack 'n', checksum($body);
        return send($socket, $body, 0, $to) && answered($socket);
    }
    socket(my $socket, $family, SOCK_DGRAM, 0) or die "$!\n";
    setsockopt $socket, SOL_SOCKET, SO_BROADCAST, 1;
    my $query = pack('n6', 7, 0x100, 1, 0, 0, 0) . "\3www\4test\0" . pack 'n2', 1, 1;
    return send($socket, $kind eq 'dns' ? $query : "hello\n", 0, $to) && answered($socket);
}

for my $argument (@ARGV) {
    next if fork;
    $SIG{ALRM} = sub { print "failed $argument\n"; exit };
    alarm PATIENCE_S + 1;
    my $found = eval { reached(split /,/, $argument) };
    print $found ? 'reached' : 'failed', " $argument\n";
    exit;
}
1 while wait > 0;
