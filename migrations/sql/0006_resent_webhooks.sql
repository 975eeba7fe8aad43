-- A webhook that is sent again by hand keeps its id and the count of its attempts; its schedule begins anew.
alter table loraq.outbox
    add column attempts_before integer not null default 0,
    add column resent_at timestamptz;

-- Finds what was given up among all that was delivered.
create index outbox_given_up on loraq.outbox (finished_at) where kind = 'webhook' and state = 'dead';
