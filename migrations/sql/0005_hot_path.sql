-- Fewer index entries for each job. A job's row is written twice or more; where no index mentions what changes and the
-- page has room, Postgres keeps the new version beside the old one and touches no index (HOT).
-- Measured: docs/performance.md.

-- It mentioned the state, so that every step of a job cost an entry in every index of its table. Nothing reads it.
drop index loraq.jobs_unfinished;

-- Room for a second version of every row.
create or replace function loraq.ensure_partitions(days_ahead integer) returns void language plpgsql as $$
declare
    day date;
    parent text;
    storage text;
begin
    for offset_days in 0..days_ahead loop
        day := current_date + offset_days;
        foreach parent in array array['jobs', 'results'] loop
            storage := case parent when 'jobs' then 'with (fillfactor = 50)' else '' end;
            if to_regclass(format('loraq.%I', parent || '_' || to_char(day, 'YYYYMMDD'))) is null then
                begin
                    execute format('create table if not exists loraq.%I partition of loraq.%I for values from (%L) to (%L) %s',
                                   parent || '_' || to_char(day, 'YYYYMMDD'), parent, day, day + 1, storage);
                exception when check_violation then
                    raise warning 'rows of % are in the default partition of % already and stay there', day, parent;
                end;
            end if;
        end loop;
    end loop;
end $$;

do $$
declare
    partition_name regclass;
begin
    for partition_name in select inhrelid::regclass from pg_inherits where inhparent = 'loraq.jobs'::regclass loop
        execute format('alter table %s set (fillfactor = 50)', partition_name);
    end loop;
end $$;

-- Keys are written in the order of their days, which a summary per range of pages finds as well as a tree.
drop index loraq.job_keys_by_day;
create index job_keys_by_day on loraq.job_keys using brin (accepted_on) with (pages_per_range = 32, autosummarize = on);

-- One effect of a kind, a type and a target for each job: a guard that an id made anew by every attempt never was. It
-- finds a job's effects too. Keys of jobs must be kept at least as long as outbox rows.
alter table loraq.outbox drop constraint outbox_event_id_kind_target_key;
drop index loraq.outbox_by_job;
create unique index outbox_one_of_each on loraq.outbox (tenant, job_id, kind, type, target);
