-- Which ended jobs were replayed, and as what: a replay that is asked for twice is noticed before its record is taken.
create table loraq.job_replays (
    tenant text not null,
    job_id uuid not null,
    new_job_id uuid not null,
    begun_at timestamptz not null default now(),
    sent_at timestamptz,
    primary key (tenant, job_id)
);
