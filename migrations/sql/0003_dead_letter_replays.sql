-- Which dead letters were sent back, so that sending one twice is noticed. A topic that is made anew counts its offsets
-- from 0 again: the time at which the letter was put aside tells its letters from those of the old one.
create table loraq.dead_letter_replays (
    cluster text not null,
    topic text not null,
    partition integer not null,
    "offset" bigint not null,
    put_aside_at timestamptz not null,
    times integer not null default 1,
    begun_at timestamptz not null default now(),
    sent_at timestamptz,
    sent_to text,
    primary key (cluster, topic, partition, "offset", put_aside_at)
);
create index dead_letter_replays_by_age on loraq.dead_letter_replays (begun_at);
