-- Where adapters are, and which of them are spread over several partitions.

alter table loraq.worker_status add column saturated boolean not null default false;
comment on column loraq.worker_status.saturated is 'Private. Whether a job that the worker claimed now would wait for long.';

-- As worthless after a crash of the server as the rows that it belongs to; workers write it again.
create unlogged table loraq.worker_adapters (
    pool text not null,
    worker text not null,
    digest text not null,
    tier text not null check (tier in ('device', 'host', 'disk')),
    primary key (pool, digest, worker),
    foreign key (pool, worker) references loraq.worker_status on delete cascade
);
create index worker_adapters_by_worker on loraq.worker_adapters (pool, worker);
comment on table loraq.worker_adapters is 'Private. The adapters that each live worker has, and the fastest tier that each is in.';

create table loraq.hot_adapters (
    pool text not null,
    tenant text not null references loraq.tenants on delete cascade,
    adapter text not null,
    partitions integer not null check (partitions between 2 and 1024),
    load double precision not null,
    changed_at timestamptz not null default clock_timestamp(),
    primary key (pool, tenant, adapter)
);
comment on table loraq.hot_adapters is 'Private. Adapters whose jobs spread over several partitions; `loraq hot-adapters` lists them.';
