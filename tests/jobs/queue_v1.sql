-- The tables of a queue file of version 1, as gpuherd made them then.

CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE runs (
    id INTEGER PRIMARY KEY,
    pid INTEGER NOT NULL,
    boot TEXT NOT NULL,
    started_at REAL NOT NULL,
    started_mono REAL NOT NULL,
    ended_at REAL
);
CREATE TABLE jobs (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    spec TEXT NOT NULL,
    gpus INTEGER NOT NULL CHECK (typeof(gpus) = 'integer' AND gpus >= 0),
    priority INTEGER NOT NULL CHECK (typeof(priority) = 'integer'),
    submission INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('waiting', 'running', 'done', 'failed', 'cancelled')),
    blocked INTEGER NOT NULL DEFAULT 0 CHECK (blocked >= 0),
    tries INTEGER NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0,
    not_before REAL NOT NULL DEFAULT 0,
    avoid TEXT NOT NULL DEFAULT '[]',
    ready_at REAL NOT NULL,
    reason TEXT
);
CREATE INDEX jobs_ready ON jobs ((gpus > 0), priority DESC, id) WHERE state = 'waiting' AND blocked = 0;
CREATE INDEX jobs_later ON jobs (not_before) WHERE state = 'waiting' AND blocked = 0;
CREATE INDEX jobs_count ON jobs (submission, state);
CREATE TABLE needs (
    job INTEGER NOT NULL REFERENCES jobs (id),
    needed INTEGER NOT NULL REFERENCES jobs (id),
    PRIMARY KEY (job, needed)
) WITHOUT ROWID;
CREATE INDEX needs_needed ON needs (needed);
CREATE TABLE attempts (
    id INTEGER PRIMARY KEY,
    job INTEGER NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL,
    run INTEGER NOT NULL REFERENCES runs (id),
    state TEXT NOT NULL CHECK (state IN ('running', 'done', 'failed', 'requeued')),
    gpus TEXT NOT NULL,
    labels TEXT NOT NULL,
    pid INTEGER NOT NULL,
    start_ticks INTEGER NOT NULL,
    boot TEXT NOT NULL,
    log TEXT NOT NULL,
    wait_s REAL NOT NULL,
    leased_mono REAL,
    started_at REAL NOT NULL,
    started_mono REAL NOT NULL,
    ended_at REAL,
    ended_mono REAL,
    exit_code INTEGER,
    signal INTEGER,
    class TEXT,
    reason TEXT
);
CREATE UNIQUE INDEX attempts_running ON attempts (job) WHERE state = 'running';
CREATE INDEX attempts_job ON attempts (job);
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    at REAL NOT NULL,
    kind TEXT NOT NULL,
    job TEXT,
    attempt INTEGER,
    text TEXT NOT NULL
);
