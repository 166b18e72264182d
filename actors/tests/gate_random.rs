//! The gate under random trouble: what was told is what happened, and it always comes back.

use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use tokio::time::{Instant, sleep};
use workpump_actors::instance::Gate;
use workpump_actors::message::{GateChanged, ProbeNow};
use workpump_actors::options::Options;
use workpump_actors::port::StoreError;
use workpump_actors::testing::{DirectOp, FakeDirect, GateRig, Reply, TestProbe, in_virtual_time, quiesce};

const ROUNDS: u64 = 40;

/// How long a gate may stay open that is broken: an interval, a timeout, and the sending.
const FOUND_WITHIN: Duration = Duration::from_secs(30 + 5 + 5);

/// What fails now, with this probability, for each kind of call.
fn trouble(rng: &mut SmallRng) -> impl Fn(DirectOp) -> Option<Reply> + Send + 'static {
    let broken: Vec<DirectOp> =
        [DirectOp::Connect, DirectOp::Listen, DirectOp::Ring, DirectOp::Ping, DirectOp::WorkChannel]
            .into_iter()
            .filter(|_| rng.random_bool(0.25))
            .collect();
    let hangs = rng.random_bool(0.3);
    move |op| {
        let failed = || Reply::Fail(StoreError::Unavailable("trouble".to_owned()));
        broken.contains(&op).then(|| if hangs { Reply::Hang } else { failed() })
    }
}

fn told(probe: &mut TestProbe<GateChanged>, so_far: &mut Vec<Gate>) {
    so_far.extend(probe.take().into_iter().map(|GateChanged(gate)| gate));
}

#[test]
fn whatever_happens_each_change_is_told_once_the_gate_is_open_only_when_it_works_and_it_comes_back() {
    in_virtual_time(async {
        for seed in 0..ROUNDS {
            let mut rng = SmallRng::seed_from_u64(seed);
            let server = FakeDirect::new();
            let mut rig = GateRig::seeded(&Options::default(), &server, seed);
            let mut subscriber = rig.subscriber();
            let (mut news, mut heard) = (Vec::new(), Vec::new());
            let mut deaf_since = None;
            for _ in 0..30 {
                match rng.random_range(0..8) {
                    0 | 1 => server.end_session(),
                    2 => {
                        let deaf = rng.random();
                        server.set_deaf(deaf);
                        deaf_since = deaf.then(|| deaf_since.unwrap_or_else(Instant::now));
                    }
                    3 => server.always(trouble(&mut rng)),
                    4 => server.recover(),
                    5 => rig.addr.do_send(ProbeNow),
                    6 if rng.random_bool(0.3) => rig.restart().await,
                    _ => {}
                }
                if rng.random_bool(0.7) {
                    sleep(Duration::from_millis(rng.random_range(0..20_000))).await;
                }
                quiesce().await;
                told(&mut rig.news, &mut news);
                told(&mut subscriber, &mut heard);
                let gate = rig.standing.gate();
                if gate == Gate::Available {
                    assert!(server.is_connected() && !server.channels().is_empty(), "seed {seed}");
                    let deaf_for = deaf_since.map_or(Duration::ZERO, |since| since.elapsed());
                    assert!(deaf_for <= FOUND_WITHIN, "seed {seed}: deaf for {deaf_for:?} and open");
                }
                assert_eq!(news.last().copied().unwrap_or_default(), gate, "seed {seed}");
            }
            server.recover();
            server.set_deaf(false);
            sleep(FOUND_WITHIN + Duration::from_secs(20)).await;
            told(&mut rig.news, &mut news);
            told(&mut subscriber, &mut heard);
            assert_eq!(rig.standing.gate(), Gate::Available, "seed {seed}: {:?}", rig.standing.gate_report());
            assert!(news.windows(2).all(|pair| pair[0] != pair[1]), "seed {seed}: {news:?}");
            heard.retain(|gate| *gate != Gate::Unconfigured);
            assert_eq!(heard, news, "seed {seed}: everybody is told the same");
            assert_eq!(rig.standing.gate_report().changes, news.len() as u64, "seed {seed}");
        }
    });
}

#[test]
fn a_hundred_cuts_in_a_row_never_leave_the_instance_without_its_lock_for_as_long_as_a_grace() {
    in_virtual_time(async {
        for (grace, seed) in [(1, 1), (5, 2), (5, 3), (60, 4)] {
            let mut options = Options::default();
            options.liveness.lock_loss_grace_seconds = grace;
            let server = FakeDirect::new();
            let mut rig = GateRig::seeded(&options, &server, seed);
            rig.ready().await;
            let start = Instant::now();
            for cut in 0..100 {
                server.end_session();
                let cut_at = Instant::now();
                while !server.holds_lock(rig.instance) {
                    sleep(Duration::from_millis(10)).await;
                }
                let (without, grace) = (cut_at.elapsed(), Duration::from_secs(grace.into()));
                assert!(
                    without < grace.mul_f64(0.91).max(Duration::from_millis(20)),
                    "cut {cut}: {without:?} of {grace:?}"
                );
            }
            let took = start.elapsed();
            assert!(took > Duration::from_secs(50), "and it is no hot loop: {took:?}");
            sleep(Duration::from_secs(10)).await;
            assert_eq!(rig.standing.gate(), Gate::Available);
            assert_eq!(server.sessions(), 101, "one each");
        }
    });
}

#[test]
fn a_hundred_instances_do_not_come_back_in_one_wave() {
    in_virtual_time(async {
        let servers: Vec<_> = (0..100).map(|_| FakeDirect::new()).collect();
        let rigs: Vec<_> = servers
            .iter()
            .zip(0..)
            .map(|(server, seed)| GateRig::seeded(&Options::default(), server, seed))
            .collect();
        sleep(Duration::from_mins(1)).await;
        for server in &servers {
            server.always(|op| {
                (op == DirectOp::Connect)
                    .then(|| Reply::Fail(StoreError::Unavailable("starting up".to_owned())))
            });
            server.end_session();
        }
        sleep(Duration::from_secs(12)).await;
        servers.iter().for_each(FakeDirect::recover);
        let back = Instant::now();
        let mut arrived = Vec::new();
        while arrived.len() < 100 {
            sleep(Duration::from_millis(100)).await;
            let here = servers.iter().filter(|server| server.is_connected()).count();
            arrived.resize(here, back.elapsed());
        }
        let spread = arrived[99].saturating_sub(arrived[0]);
        assert!(spread >= Duration::from_secs(2), "{spread:?}");
        let most = arrived.iter().map(|at| arrived.iter().filter(|other| *other == at).count()).max();
        assert!(most < Some(15), "{most:?} within 100 ms");
        drop(rigs);
    });
}
