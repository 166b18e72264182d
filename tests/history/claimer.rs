//! An instance: claims, works in order, fails, hands back, dies, and comes back from the dead with old epochs.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rand::RngExt;
use rand::rngs::StdRng;
use tokio::time::Instant;
use tokio_postgres::Error;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::{LEASE, Op, World, spend};
use crate::work::{Claimed, KINDS, Session, session};

/// What is done next with a run. Counts are of rows from its head.
#[derive(Clone, Copy, Debug)]
enum Step {
    Complete(usize),
    Retry,
    DeadLetter,
    ReleaseRest,
    Renew,
    Pause,
}

/// The rest of a run, in order; its head is the next row to be worked on.
type Rest = VecDeque<Claimed>;

struct Item {
    row: Claimed,
    verdict: &'static str,
    after: Option<i64>,
}

pub(crate) struct Claimer {
    world: Arc<World>,
    db: Session,
    me: Uuid,
    choices: StdRng,
    /// Runs this instance has lost, or behaves as if it had.
    zombies: Vec<Rest>,
    /// What the last claim brought.
    brought: HashSet<Uuid>,
}

/// The plan for a run. It may stop short of the end: the instance died there.
fn fate(choices: &mut StdRng, rows: usize) -> VecDeque<Step> {
    let part = choices.random_range(0..rows);
    let head = [Step::Complete(part), Step::Pause];
    let tail: &[Step] = match choices.random_range(0..100) {
        0..45 => &[Step::Complete(usize::MAX)],
        45..58 => &[Step::Retry],
        58..66 => &[Step::DeadLetter, Step::Complete(usize::MAX)],
        66..74 => &[Step::ReleaseRest],
        74..86 => &[],
        _ => &[Step::Renew, Step::Pause, Step::Renew, Step::Complete(usize::MAX)],
    };
    head.iter().chain(tail).copied().collect()
}

fn runs(rows: Vec<Claimed>) -> Vec<Rest> {
    let mut runs: BTreeMap<_, Rest> = BTreeMap::new();
    for row in rows {
        let alone = row.stream.is_none().then_some(row.id);
        let lane = if row.category == "outbox" || row.category == "inbox" { None } else { row.name.clone() };
        runs.entry((row.category.clone(), row.stream, lane, alone)).or_default().push_back(row);
    }
    runs.into_values().collect()
}

impl Claimer {
    pub(crate) async fn new(world: Arc<World>, number: u64) -> Self {
        let db = session(&world.url).await;
        let me = db.member().await;
        let choices = world.choices(100 + number);
        Self { world, db, me, choices, zombies: Vec::new(), brought: HashSet::new() }
    }

    pub(crate) async fn live(mut self) {
        while !self.world.is_over() {
            let rows = self.claim().await;
            self.brought = rows.iter().map(|row| row.id).collect();
            if rows.is_empty() {
                spend(&mut self.choices, 4).await;
            }
            self.work(runs(rows)).await;
            while !self.zombies.is_empty() && self.choices.random_bool(0.5) {
                self.rise().await;
            }
        }
    }

    fn failed(&self, what: &str, error: &Error) {
        let code = error.code().map_or("no answer", |code| code.code());
        self.world.violated(format!("{what} failed with {code}: {error:?}"));
    }

    async fn claim(&mut self) -> Vec<Claimed> {
        let categories =
            self.choices.random_bool(0.4).then(|| vec![KINDS[self.choices.random_range(0..4)].category]);
        let (rows, run) = (self.choices.random_range(1..40_i32), self.choices.random_range(1..8_i32));
        let (open, rolled_back) = (self.choices.random_bool(0.4), self.choices.random_bool(0.1));
        let op = self.world.begin(Op::Claim { me: self.me, answer: None });
        if open {
            self.statement("begin").await;
            // A transaction is older than its statements.
            self.statement("select count(*) from wh_service_instances").await;
        }
        let start = Instant::now();
        let arguments: [&(dyn ToSql + Sync); 6] = [&op, &self.me, &rows, &LEASE, &categories, &run];
        let sql = "select * from hist.claim($1, $2, $3, $4, $5, $6)";
        let answer = self.db.query(sql, &arguments).await;
        let micros = start.elapsed().as_micros() as i64;
        self.world.max_claim_micros.fetch_max(micros, Ordering::Relaxed);
        self.world.claims.fetch_add(1, Ordering::Relaxed);
        let rows: Vec<_> = match answer {
            Ok(rows) => rows.iter().map(Claimed::from_row).collect(),
            Err(error) => {
                self.failed("a claim", &error);
                Vec::new()
            }
        };
        if open {
            spend(&mut self.choices, 20).await;
            self.statement(if rolled_back { "rollback" } else { "commit" }).await;
            if rolled_back {
                return Vec::new();
            }
        }
        let told = rows.iter().map(|row| (row.id, row.epoch)).collect();
        self.world.answer(op, |op| {
            if let Op::Claim { answer, .. } = op {
                *answer = Some(told);
            }
        });
        rows
    }

    async fn statement(&self, sql: &str) {
        if let Err(error) = self.db.batch_execute(sql).await {
            self.failed(sql, &error);
        }
    }

    /// Works on all runs side by side, a step of each at a time.
    async fn work(&mut self, runs: Vec<Rest>) {
        let plan = |run: Rest| {
            let steps = if self.world.is_settling() {
                VecDeque::from([Step::Complete(usize::MAX)])
            } else {
                fate(&mut self.choices, run.len())
            };
            (run, steps)
        };
        let mut runs: Vec<_> = runs.into_iter().map(plan).collect();
        while !runs.is_empty() {
            let mut items = Vec::new();
            for (rest, steps) in &mut runs {
                let Some(step) = steps.pop_front() else { continue };
                if matches!(step, Step::Renew) && !self.renew(rest).await {
                    steps.clear();
                }
                if matches!(step, Step::Pause) {
                    spend(&mut self.choices, 4).await;
                }
                take(&mut self.choices, rest, step, &mut items);
            }
            let fenced = self.settle(items).await;
            for (rest, steps) in &mut runs {
                // A row of this run is somebody else's now: so is the rest of it.
                if rest
                    .iter()
                    .any(|row| fenced.contains(&(row.category.clone(), row.stream, row.name.clone())))
                {
                    steps.clear();
                }
            }
            if !self.zombies.is_empty() && self.choices.random_bool(0.2) {
                self.rise().await;
            }
            let (over, going) = runs.into_iter().partition(|(_, steps)| steps.is_empty());
            runs = going;
            let over: Vec<(Rest, VecDeque<Step>)> = over;
            self.zombies.extend(over.into_iter().map(|(rest, _)| rest).filter(|rest| !rest.is_empty()));
        }
    }

    /// Settles, and returns the streams of which rows were fenced.
    async fn settle(&mut self, items: Vec<Item>) -> Vec<(String, Option<Uuid>, Option<String>)> {
        if items.is_empty() {
            return Vec::new();
        }
        let keep = self.choices.random_bool(0.2);
        let asked: HashMap<_, _> = items.iter().map(|i| (i.row.id, (i.row.epoch, i.verdict))).collect();
        let op = self.world.begin(Op::Settle { me: self.me, asked, answer: None });
        let categories: Vec<_> = items.iter().map(|i| i.row.category.as_str()).collect();
        let ids: Vec<_> = items.iter().map(|i| i.row.id).collect();
        let epochs: Vec<_> = items.iter().map(|i| i.row.epoch).collect();
        let verdicts: Vec<_> = items.iter().map(|i| i.verdict).collect();
        let verdicts = verdicts.iter().any(|verdict| *verdict != "complete").then_some(verdicts);
        let after: Vec<_> = items.iter().map(|i| i.after).collect();
        let arguments: [&(dyn ToSql + Sync); 8] =
            [&op, &self.me, &categories, &ids, &epochs, &verdicts, &after, &keep];
        let sql = "select hist.settle($1, $2, $3, $4, $5, $6, $7, $8)";
        let fenced: Vec<Uuid> = match self.db.query(sql, &arguments).await {
            Ok(rows) => rows.iter().map(|row| row.get(0)).collect(),
            Err(error) => {
                self.failed("a settlement", &error);
                return Vec::new();
            }
        };
        let told = fenced.clone();
        self.world.answer(op, |op| {
            if let Op::Settle { answer, .. } = op {
                *answer = Some(told);
            }
        });
        let of = items.into_iter().filter(|i| fenced.contains(&i.row.id));
        of.map(|i| (i.row.category, i.row.stream, i.row.name)).collect()
    }

    /// Renews a run until no row of it is locked by somebody. False: at least one row is lost.
    async fn renew(&mut self, rest: &Rest) -> bool {
        if rest.is_empty() {
            return true;
        }
        let ids: Vec<_> = rest.iter().map(|row| row.id).collect();
        let epochs: Vec<_> = rest.iter().map(|row| row.epoch).collect();
        let deadline = Instant::now() + std::time::Duration::from_millis(600);
        loop {
            let asked = ids.iter().copied().zip(epochs.iter().copied()).collect();
            let op = self.world.begin(Op::Renew { me: self.me, asked, answer: None });
            let arguments: [&(dyn ToSql + Sync); 6] =
                [&op, &rest[0].category, &self.me, &ids, &epochs, &LEASE];
            let answer =
                self.db.query("select id, locked from hist.renew($1, $2, $3, $4, $5, $6)", &arguments).await;
            let rows: Vec<(Uuid, bool)> = match answer {
                Ok(rows) => rows.iter().map(|row| (row.get(0), row.get(1))).collect(),
                Err(error) => {
                    self.failed("a renewal", &error);
                    return false;
                }
            };
            let told = rows.iter().filter(|(_, locked)| !locked).map(|(id, _)| *id).collect();
            self.world.answer(op, |op| {
                if let Op::Renew { answer, .. } = op {
                    *answer = Some(told);
                }
            });
            if rows.len() < ids.len() || Instant::now() > deadline {
                return false;
            }
            if rows.iter().all(|(_, locked)| !locked) {
                return true;
            }
            spend(&mut self.choices, 3).await;
        }
    }

    /// Rather one that has a row which is held again, under a newer epoch: there a missing fence shows.
    fn choose_zombie(&mut self) -> usize {
        let again = |zombie: &Rest| zombie.iter().any(|row| self.brought.contains(&row.id));
        let meeting: Vec<_> =
            (0..self.zombies.len()).filter(|number| again(&self.zombies[*number])).collect();
        if !meeting.is_empty() && self.choices.random_bool(0.7) {
            return meeting[self.choices.random_range(0..meeting.len())];
        }
        self.choices.random_range(0..self.zombies.len())
    }

    /// Acts on a run that is lost, or abandoned, under its old epochs.
    async fn rise(&mut self) {
        let number = self.choose_zombie();
        if !self.world.is_settling() && self.choices.random_bool(0.5) {
            let rest = self.zombies[number].clone();
            self.renew(&rest).await;
            return;
        }
        let mut rest = self.zombies.swap_remove(number);
        if self.zombies.len() < 20 && self.choices.random_bool(0.7) {
            // It will try again, under the same epochs.
            self.zombies.push(rest.clone());
        }
        let mut items = Vec::new();
        let step = match self.choices.random_range(0..3) {
            0 => Step::Complete(usize::MAX),
            1 => Step::Retry,
            _ => Step::ReleaseRest,
        };
        take(&mut self.choices, &mut rest, step, &mut items);
        self.settle(items).await;
    }
}

/// Moves the rows that a step settles out of the run.
fn take(choices: &mut StdRng, rest: &mut Rest, step: Step, items: &mut Vec<Item>) {
    let (count, verdict) = match step {
        Step::Complete(count) => (count, "complete"),
        Step::Retry => (1, "retry"),
        Step::DeadLetter => (1, "dead_letter"),
        Step::ReleaseRest => (usize::MAX, "release"),
        Step::Renew | Step::Pause => return,
    };
    let after = (verdict == "retry").then(|| choices.random_range(0..80_i64));
    items.extend(rest.drain(..count.min(rest.len())).map(|row| Item { row, verdict, after }));
    if verdict == "retry" {
        // The database hands the rest of the run back.
        rest.clear();
    }
}
