{{- /* What can't work is refused here; each message says what to change. */ -}}

{{- define "baton.check" -}}
{{- include "baton.checkNames" . }}
{{- include "baton.checkLabels" (dict "root" .) }}
{{- include "baton.checkRayPorts" . }}
{{- include "baton.checkSizes" . }}
{{- range $role := list "prefill" "decode" }}
{{- include "baton.checkPool" (dict "root" $ "role" $role "pool" (index $.Values $role)) }}
{{- end }}
{{- include "baton.checkAdapters" (dict "root" . "where" "model.adapters") }}
{{- include "baton.checkModels" . }}
{{- include "baton.checkUpgrade" . }}
{{- include "baton.checkLayouts" . }}
{{- include "baton.checkConfigs" . }}
{{- include "baton.checkRedis" . }}
{{- include "baton.checkRay" . }}
{{- include "baton.checkScaling" . }}
{{- include "baton.checkTls" . }}
{{- include "baton.checkRouter" . }}
{{- include "baton.checkNetwork" . }}
{{- include "baton.checkRoutes" . }}
{{- include "baton.checkGroups" . }}
{{- include "baton.checkTests" . }}
{{- end -}}

{{- /* cluster/protocol/link.py: workers from before the link have no version in common with routers of today. */ -}}
{{- define "baton.checkUpgrade" -}}
{{- range $role := list "prefill" "decode" }}
{{- $name := printf "%s-%s" (include "baton.base" $) $role }}
{{- $worker := index ((lookup "v1" "ConfigMap" $.Release.Namespace $name).data | default dict) "worker.yaml" }}
{{- if and $.Release.IsUpgrade $worker (not (contains "link_port" $worker)) }}
{{- fail (printf "%s is of a release from before the link between routers and workers: routers and workers of the two can't serve each other; uninstall it and install, or install a second release and move clients" $name) }}
{{- end }}
{{- end }}
{{- include "baton.checkPersistence" . }}
{{- end -}}

{{- /* Kubernetes refuses an upgrade that changes the claims of a StatefulSet, by a list of the fields that may change. */ -}}
{{- define "baton.checkPersistence" -}}
{{- $name := include "baton.redisHost" . -}}
{{- $spec := (lookup "apps/v1" "StatefulSet" .Release.Namespace $name).spec | default dict -}}
{{- if and .Release.IsUpgrade .Values.redis.enabled $spec }}
{{- $wanted := .Values.redis.persistence }}
{{- $claims := $spec.volumeClaimTemplates | default list }}
{{- $differs := ne (len $claims | eq 1) $wanted.enabled }}
{{- if and $wanted.enabled $claims }}
{{- $claim := (first $claims).spec }}
{{- $same := eq (include "baton.quantity" $claim.resources.requests.storage) (include "baton.quantity" $wanted.size) }}
{{- $differs = or $differs (not $same) (ne ($claim.storageClassName | default "") $wanted.storageClass) }}
{{- end }}
{{- if $differs }}
{{- fail (printf "redis.persistence is not that of the StatefulSet %s, whose claims Kubernetes does not change: leave it as it was, or kubectl delete statefulset %s --namespace %s --cascade=foreground and upgrade again: Redis is away in between" $name $name .Release.Namespace) }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* cluster/config/adapters.py and worker.py. Takes root, where. */ -}}
{{- define "baton.checkAdapters" -}}
{{- $adapters := .root.Values.model.adapters -}}
{{- $where := .where -}}
{{- $slots := int $adapters.slots -}}
{{- if and $adapters.source (eq $slots 0) }}
{{- fail (printf "%s.source is set and %s.slots is 0: set slots to the number of adapters that may be loaded at a time" $where $where) }}
{{- end }}
{{- if and (gt $slots 0) (not $adapters.source) }}
{{- fail (printf "%s.slots = %d and %s.source names no directory: set source to that which holds the adapters, or slots to 0" $where $slots $where) }}
{{- end }}
{{- if gt (len $adapters.load) $slots }}
{{- fail (printf "%s.load names %d adapters and %s.slots is %d: raise slots, or let fewer be loaded at the start" $where (len $adapters.load) $where $slots) }}
{{- end }}
{{- range $name, $directory := $adapters.load }}
{{- if not (regexMatch "^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$" $name) }}
{{- fail (printf "%s.load: %s is no name of an adapter: letters, digits and . _ / : -, the first a letter or a digit (at most 128)" $where $name) }}
{{- end }}
{{- if or (hasPrefix "/" $directory) (has ".." (splitList "/" $directory)) }}
{{- fail (printf "%s.load: %s leads out of %s.source: name a directory below it" $where $directory $where) }}
{{- end }}
{{- end }}
{{- if and (eq .root.Values.ray.mode "external") (hasPrefix "pvc://" $adapters.source) }}
{{- fail (printf "%s.source is a claim and ray.mode external: the chart mounts nothing on that cluster's nodes; use file:///PATH, a directory that they have" $where) }}
{{- end }}
{{- end -}}

{{- define "baton.checkPool" -}}
{{- $values := .root.Values -}}
{{- $role := .role -}}
{{- $pool := .pool -}}
{{- $gpus := mul (int $pool.gpus) (int $pool.nodes) | int -}}
{{- if and (eq $role "decode") $pool.draftModel (ne $pool.speculation "none") }}
{{- fail (printf "decode.draftModel and decode.speculation %s exclude each other: drafts come from one of them" $pool.speculation) }}
{{- end }}
{{- if and (gt $gpus 0) (ne $gpus (int $pool.tensorParallel)) }}
{{- fail (printf "%s: %d GPUs × %d nodes are not %s.tensorParallel = %d: a worker needs one GPU per rank, set %s.gpus × %s.nodes equal to it" $role (int $pool.gpus) (int $pool.nodes) $role (int $pool.tensorParallel) $role $role) }}
{{- end }}
{{- if and (gt $gpus 0) (not $pool.gpuResource) (not $pool.resourceClaims) }}
{{- fail (printf "%s has %d GPUs of no resource: set %s.gpuResource, or %s.resourceClaims to get them by DRA" $role $gpus $role $role) }}
{{- end }}
{{- if and (gt $gpus 0) (hasPrefix "habana.ai/" $pool.gpuResource) }}
{{- fail (printf "%s.gpuResource = %s: the engine computes on CUDA, ROCm and CPUs, and Gaudi is none of them; use other nodes for this pool" $role $pool.gpuResource) }}
{{- end }}
{{- if and (gt $gpus 0) (hasPrefix "amd.com/" $pool.gpuResource) (not $pool.image) }}
{{- fail (printf "%s.gpuResource = %s: images with -cuda have no ROCm; set %s.image to one that was built with PyTorch for ROCm" $role $pool.gpuResource $role) }}
{{- end }}
{{- if and $pool.resourceClaims (semverCompare "<1.34-0" .root.Capabilities.KubeVersion.Version) }}
{{- fail (printf "%s.resourceClaims needs dynamic resource allocation, which this cluster (%s) does not have: upgrade to Kubernetes 1.34, or use a device plugin and %s.gpuResource" $role .root.Capabilities.KubeVersion.Version $role) }}
{{- end }}
{{- if and (eq $gpus 0) (mod (int $pool.tensorParallel) (int $pool.nodes)) }}
{{- fail (printf "%s.tensorParallel = %d can't be shared by %s.nodes = %d pods: make it a multiple" $role (int $pool.tensorParallel) $role (int $pool.nodes)) }}
{{- end }}
{{- $kvDtype := $values.model.kvDtype }}
{{- if and (hasPrefix "bf16" $kvDtype) (eq ($pool.dtype | default $values.model.dtype) "float32") }}
{{- fail (printf "model.kvDtype = %s is for models computed in bfloat16, and those of %s are computed in float32: set kvDtype to auto" $kvDtype $role) }}
{{- end }}
{{- if and (hasSuffix "int8" $kvDtype) (mod (int $values.model.pageSize) 8) }}
{{- fail (printf "model.kvDtype = %s needs a model.pageSize that 8 divides, not %d" $kvDtype (int $values.model.pageSize)) }}
{{- end }}
{{- $limits := $pool.resources.limits | default dict }}
{{- if and (eq $gpus 0) (eq (int64 $pool.kvMemoryBytes) 0) (not $limits.memory) (ne $values.ray.mode "external") }}
{{- fail (printf "%s has no GPUs, no %s.resources.limits.memory and no %s.kvMemoryBytes: its KV pool would take %s of the node's memory; set one of them" $role $role $role (toString $pool.memoryUtilization)) }}
{{- end }}
{{- if ge (int $pool.drainSeconds) (int $pool.terminationGracePeriodSeconds) }}
{{- fail (printf "%s.drainSeconds = %d is not below %s.terminationGracePeriodSeconds = %d: Kubernetes would kill the worker while it drains; raise the grace period or drain for a shorter time" $role (int $pool.drainSeconds) $role (int $pool.terminationGracePeriodSeconds)) }}
{{- end }}
{{- if and $values.autoscaling.enabled (not (kindIs "invalid" $pool.replicas)) }}
{{- fail (printf "autoscaling.enabled and %s.replicas = %d both set the pool's size: remove %s.replicas and set autoscaling.%s.minReplicas, or turn autoscaling off" $role (int $pool.replicas) $role $role) }}
{{- end }}
{{- include "baton.checkWorkerPorts" . }}
{{- $bounds := index $values.autoscaling $role }}
{{- if and $values.autoscaling.enabled (gt (int $bounds.minReplicas) (int $bounds.maxReplicas)) }}
{{- fail (printf "autoscaling.%s.minReplicas = %d is above maxReplicas = %d: lower one or raise the other" $role (int $bounds.minReplicas) (int $bounds.maxReplicas)) }}
{{- end }}
{{- $startup := mul (int $pool.startupFailures) 5 | int }}
{{- if and (gt $startup 0) (lt $startup (int $values.model.loadSeconds)) }}
{{- fail (printf "%s.startupFailures = %d kills a worker after %d s, but model.loadSeconds allows %d s for loading: raise startupFailures to %d or set it to 0" $role (int $pool.startupFailures) $startup (int $values.model.loadSeconds) (divf $values.model.loadSeconds 5 | ceil | int)) }}
{{- end }}
{{- if and (eq $pool.probe "grpc") $values.tls.enabled }}
{{- fail (printf "%s.probe = grpc with tls.enabled: a worker's gRPC port requires a certificate, and probes have none in any version of Kubernetes; set %s.probe to http" $role $role) }}
{{- end }}
{{- $groups := and (eq $values.ray.mode "none") (include "baton.inGroups" .) }}
{{- if and (gt (int $pool.nodes) 1) (ne $values.ray.mode "embedded") (not $groups) }}
{{- fail (printf "%s.nodes = %d needs ray.mode embedded, or none with multiNode.by leaderWorkerSet, and the mode is %s: set one of them, or give the worker one pod with all of its GPUs" $role (int $pool.nodes) $values.ray.mode) }}
{{- end }}
{{- if and (gt (int $pool.nodes) 1) $values.autoscaling.enabled }}
{{- fail (printf "autoscaling.enabled can't size workers of %s.nodes = %d pods: turn it off, or set nodes to 1" $role (int $pool.nodes)) }}
{{- end }}
{{- end -}}

{{- /* kv_transfer/layout/compatibility.py: tensor-parallel degrees may differ, everything else must be equal. */ -}}
{{- define "baton.checkLayouts" -}}
{{- $model := .Values.model -}}
{{- $dtypes := list (.Values.prefill.dtype | default $model.dtype) (.Values.decode.dtype | default $model.dtype) }}
{{- if ne (index $dtypes 0) (index $dtypes 1) }}
{{- fail (printf "prefill.dtype %s and decode.dtype %s: KV of one can't be converted into the other's; set model.dtype for both" (index $dtypes 0) (index $dtypes 1)) }}
{{- end }}
{{- $transfer := .Values.transfer }}
{{- $required := $transfer.requireTransport | replace "rdma" "nixl" }}
{{- if and $required (ne $transfer.transport "auto") (ne $transfer.transport $required) }}
{{- fail (printf "transfer.requireTransport is %s and transfer.transport is %s: no pair could ever start; make them equal, or transport auto" $transfer.requireTransport $transfer.transport) }}
{{- end }}
{{- $tested := .Values.tests.handoffTransport }}
{{- $used := include "baton.onlyTransport" . }}
{{- if and .Values.tests.enabled (has $tested (list "nixl" "grpc")) $used (ne $used $tested) }}
{{- fail (printf "tests.handoffTransport is %s and workers may use %s only: helm test could never succeed; set tests.handoffTransport to auto" $tested $used) }}
{{- end }}
{{- if gt (int $transfer.nixlPorts.first) (int $transfer.nixlPorts.last) }}
{{- fail (printf "transfer.nixlPorts.first = %d is above last = %d: swap them" (int $transfer.nixlPorts.first) (int $transfer.nixlPorts.last)) }}
{{- end }}
{{- end -}}

{{- define "baton.checkRedis" -}}
{{- $all := or .Values.externalRedis.url .Values.externalRedis.urlSecret.name -}}
{{- $external := $all -}}
{{- range $user := splitList " " (include "baton.redisUsers" .) }}
{{- $own := index $.Values.externalRedis $user }}
{{- $external = or $external $own.url $own.urlSecret.name }}
{{- if and $own.url $own.urlSecret.name }}
{{- fail (printf "externalRedis.%s.url and externalRedis.%s.urlSecret.name are both set: keep one" $user $user) }}
{{- end }}
{{- end }}
{{- if and .Values.redis.enabled $external }}
{{- fail "redis.enabled and externalRedis are both set: turn redis.enabled off to use the external one, or empty externalRedis" }}
{{- end }}
{{- if not (or .Values.redis.enabled $external) }}
{{- fail "redis.enabled is off and externalRedis names none: set externalRedis.urlSecret.name, or turn redis.enabled on" }}
{{- end }}
{{- if and .Values.externalRedis.url .Values.externalRedis.urlSecret.name }}
{{- fail "externalRedis.url and externalRedis.urlSecret.name are both set: keep one" }}
{{- end }}
{{- $scales := and .Values.autoscaling.enabled (include "baton.workersAreSets" .) }}
{{- range $user := splitList " " (include "baton.redisUsers" .) }}
{{- $own := index $.Values.externalRedis $user }}
{{- if and $external (or $scales (ne $user "autoscaler")) (not (or $all $own.url $own.urlSecret.name)) }}
{{- fail (printf "externalRedis names no Redis for the %s: set externalRedis.%s.urlSecret.name, or externalRedis.urlSecret.name for all components" $user $user) }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.checkScaling" -}}
{{- $scaling := .Values.autoscaling -}}
{{- if $scaling.enabled }}
{{- if and (eq (int $scaling.prefill.minReplicas) 0) (not $scaling.scaleToZero) }}
{{- fail "autoscaling.prefill.minReplicas is 0: set autoscaling.scaleToZero, or at least 1" }}
{{- end }}
{{- $least := 0 }}
{{- range $role := list "prefill" "decode" }}
{{- $least = add $least (mul (max 1 (int (index $scaling $role).minReplicas)) (max 1 (int (index $.Values $role).gpus))) }}
{{- end }}
{{- if gt (int $least) (int $scaling.gpuBudget) }}
{{- fail (printf "autoscaling.gpuBudget = %d, and the smallest pools need %d: raise it, or lower minReplicas" (int $scaling.gpuBudget) (int $least)) }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.checkRay" -}}
{{- $ray := .Values.ray -}}
{{- if and (include "baton.rayRuns" .) $ray.gcsFaultTolerance.enabled (not .Values.redis.enabled) (not $ray.gcsFaultTolerance.address) }}
{{- fail "ray.gcsFaultTolerance has no Redis: set ray.gcsFaultTolerance.address (and passwordSecret), or turn it off" }}
{{- end }}
{{- if and $ray.joinWorkers (not (include "baton.joinsWorkers" .)) }}
{{- fail (printf "ray.joinWorkers is on, and no worker would join a Ray of the chart's (ray.mode %s, multiNode.by %s): only mode embedded has nodes beside workers, and pods of LeaderWorkerSets have Rays of their own; turn ray.joinWorkers off" $ray.mode .Values.multiNode.by) }}
{{- end }}
{{- if contains "@" $ray.gcsFaultTolerance.address }}
{{- fail "ray.gcsFaultTolerance.address would show its password in the head's description: leave user and password out, and set ray.gcsFaultTolerance.passwordSecret" }}
{{- end }}
{{- if and (eq $ray.mode "external") (not $ray.external.dashboardUrl) }}
{{- fail "ray.mode is external: set ray.external.dashboardUrl to that cluster's dashboard, e.g. http://ray-head.ray:8265" }}
{{- end }}
{{- if and (eq $ray.mode "kuberay") (not (.Capabilities.APIVersions.Has "ray.io/v1/RayService")) (not (.Capabilities.APIVersions.Has "ray.io/v1")) }}
{{- fail "ray.mode is kuberay, but this cluster has no ray.io/v1 RayService: install the KubeRay operator, or set ray.mode to embedded" }}
{{- end }}
{{- end -}}

{{- define "baton.checkTls" -}}
{{- $tls := .Values.tls -}}
{{- if and $tls.enabled (eq $tls.source "secrets") (not (and $tls.secrets.router $tls.secrets.worker)) }}
{{- fail "tls.source is secrets: set tls.secrets.router and tls.secrets.worker to existing Secrets, or tls.source to certManager" }}
{{- end }}
{{- if and $tls.enabled (eq $tls.source "secrets") .Values.redis.enabled (not $tls.secrets.redis) }}
{{- fail (printf "with tls.enabled the chart's Redis requires TLS: set tls.secrets.redis to an existing Secret (tls.crt for %s, tls.key, ca.crt), or use externalRedis" (include "baton.redisAddress" .)) }}
{{- end }}
{{- $manager := $tls.certManager }}
{{- if and $tls.enabled (eq $tls.source "certManager") (ge (trimSuffix "h" $manager.renewBefore | int) (trimSuffix "h" $manager.duration | int)) }}
{{- fail (printf "tls.certManager.renewBefore = %s is not below duration = %s: cert-manager would refuse the certificates; lower it" $manager.renewBefore $manager.duration) }}
{{- end }}
{{- if and $tls.enabled (eq $tls.source "certManager") (not (.Capabilities.APIVersions.Has "cert-manager.io/v1")) }}
{{- fail "tls.source is certManager, but this cluster has no cert-manager.io/v1: install cert-manager, or set tls.source to secrets" }}
{{- end }}
{{- if and (not $tls.enabled) (or $tls.clientCaSecret $tls.publicSecret) }}
{{- fail "tls.clientCaSecret and tls.publicSecret need tls.enabled: turn it on, or empty them" }}
{{- end }}
{{- if and $tls.enabled $tls.clientCaSecret .Values.tests.enabled (not .Values.tests.tlsSecret) }}
{{- fail "tls.clientCaSecret makes clients show a certificate and helm test has none: set tests.tlsSecret, or turn tests.enabled off" }}
{{- end }}
{{- end -}}

{{- define "baton.checkNetwork" -}}
{{- if and .Values.doctor.enabled (not .Values.rbac.create) }}
{{- fail "doctor.enabled makes a ServiceAccount and a ClusterRole, and rbac.create is off: turn doctor.enabled off and run baton doctor yourself, or rbac.create on" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled .Values.observability.otlpEndpoint (not .Values.networkPolicy.collector) }}
{{- fail "observability.otlpEndpoint is set, and no NetworkPolicy allows traces to leave: set networkPolicy.collector to the address of the collector, e.g. [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: observability}}}]" }}
{{- end }}
{{- end -}}

{{- define "baton.checkGroups" -}}
{{- $groups := .Values.multiNode -}}
{{- range $role := list "prefill" "decode" }}
{{- if include "baton.inGroups" (dict "root" $ "pool" (index $.Values $role)) }}
{{- /* Its pods' StatefulSets are named by it and a number, of which a label holds 52 characters. */}}
{{- $name := include "baton.groupSetName" (dict "root" $ "role" $role) }}
{{- if gt (len $name) 48 }}
{{- fail (printf "%s is longer than the 48 characters of a LeaderWorkerSet's name: set fullnameOverride to a shorter one" $name) }}
{{- end }}
{{- if not (or ($.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1") ($.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet")) }}
{{- fail "multiNode.by is leaderWorkerSet, but this cluster has no leaderworkerset.x-k8s.io/v1: install LeaderWorkerSet, or set multiNode.by to ray" }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (eq $groups.by "leaderWorkerSet") (eq (int $groups.maxUnavailable) 0) (eq (int $groups.maxSurge) 0) }}
{{- fail "multiNode.maxUnavailable and multiNode.maxSurge are both 0: no update could begin; raise one" }}
{{- end }}
{{- end -}}

{{- /* Listeners keep HTTPRoutes and GRPCRoutes apart by their hostnames: of two with a common one, a Gateway refuses the later. */ -}}
{{- define "baton.checkRoutes" -}}
{{- $router := .Values.router -}}
{{- range $kind := list "httpRoute" "grpcRoute" }}
{{- $route := index $router $kind }}
{{- if $route.enabled }}
{{- if not $route.parentRefs }}
{{- fail (printf "router.%s has no Gateway: set router.%s.parentRefs, e.g. [{name: public, namespace: gateways}]" $kind $kind) }}
{{- end }}
{{- if and $.Values.tls.enabled $.Values.tls.clientCaSecret (not $router.gatewayHasCertificate) }}
{{- fail (printf "router.%s with tls.clientCaSecret: a Gateway ends its clients' TLS, so routers would see no client's certificate and refuse every request; empty tls.clientCaSecret and let the Gateway check certificates, set router.gatewayHasCertificate if the Gateway shows routers a certificate of its own, or turn the route off and reach routers by a TLSRoute in mode Passthrough (extraObjects) or router.service.type LoadBalancer" $kind) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $router.httpRoute.enabled $router.grpcRoute.enabled }}
{{- range $http := $router.httpRoute.parentRefs }}
{{- range $grpc := $router.grpcRoute.parentRefs }}
{{- $same := and (eq $http.name $grpc.name) (eq ($http.namespace | default "") ($grpc.namespace | default "")) (eq ($http.sectionName | default "") ($grpc.sectionName | default "")) }}
{{- range $name := $router.httpRoute.hostnames | default (list "") }}
{{- if and $same (or (not $name) (not $router.grpcRoute.hostnames) (has $name $router.grpcRoute.hostnames)) }}
{{- fail (printf "router.httpRoute and router.grpcRoute have the same listener of Gateway %s and a hostname in common: it would refuse one of them; give them different hostnames, or a sectionName each" $http.name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- range $kind := list "httpRoute" "grpcRoute" }}
{{- if (index $router $kind).enabled }}
{{- if not (or ($.Capabilities.APIVersions.Has "gateway.networking.k8s.io/v1") ($.Capabilities.APIVersions.Has (printf "gateway.networking.k8s.io/v1/%s" (ternary "HTTPRoute" "GRPCRoute" (eq $kind "httpRoute"))))) }}
{{- fail (printf "router.%s is enabled, but this cluster has no gateway.networking.k8s.io/v1: install the Gateway API (1.2 or later), or turn it off" $kind) }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "baton.checkRouter" -}}
{{- $router := .Values.router -}}
{{- if and $router.autoscaling.enabled (not (kindIs "invalid" $router.replicas)) }}
{{- fail (printf "router.autoscaling.enabled and router.replicas = %d both set the number of routers: remove router.replicas and set router.autoscaling.minReplicas, or turn autoscaling off" (int $router.replicas)) }}
{{- end }}
{{- if and $router.autoscaling.enabled (gt (int $router.autoscaling.minReplicas) (int $router.autoscaling.maxReplicas)) }}
{{- fail (printf "router.autoscaling.minReplicas = %d is above maxReplicas = %d: lower one or raise the other" (int $router.autoscaling.minReplicas) (int $router.autoscaling.maxReplicas)) }}
{{- end }}
{{- $cpu := or ($router.resources.requests | default dict).cpu ($router.resources.limits | default dict).cpu }}
{{- if and $router.autoscaling.enabled (not $cpu) }}
{{- fail "router.autoscaling.enabled scales by the share of the requested CPU that is in use, and router.resources requests none: set router.resources.requests.cpu, or turn autoscaling off" }}
{{- end }}
{{- $drain := add (int $router.drainDelaySeconds) (int $router.drainSeconds) | int }}
{{- if ge $drain (int $router.terminationGracePeriodSeconds) }}
{{- fail (printf "router.drainDelaySeconds + router.drainSeconds = %d is not below router.terminationGracePeriodSeconds = %d: Kubernetes would kill the router while it drains; raise the grace period or drain for a shorter time" $drain (int $router.terminationGracePeriodSeconds)) }}
{{- end }}
{{- if le (float64 $router.drainDelaySeconds) (mulf 1.1 $router.maxConnectionSeconds) }}
{{- if gt (int $router.maxConnectionSeconds) 0 }}
{{- fail (printf "router.drainDelaySeconds = %d is not above 1.1 × router.maxConnectionSeconds = %d: some connections of a draining router would not reach their maximum age in time; raise the delay or lower the age" (int $router.drainDelaySeconds) (int $router.maxConnectionSeconds)) }}
{{- end }}
{{- end }}
{{- if and .Values.autoscaling.enabled (eq (int .Values.autoscaling.prefill.minReplicas) 0) (eq $router.localPrefill "never") }}
{{- fail "autoscaling.prefill.minReplicas is 0 and router.localPrefill is never: without a prefill worker no prompt could be computed, and no request would scale the pool up again; set localPrefill to fallback or auto, or minReplicas to 1" }}
{{- end }}
{{- if and (not .Values.autoscaling.enabled) (eq (include "baton.replicas" .Values.prefill) "0") (eq $router.localPrefill "never") }}
{{- fail "prefill.replicas is 0 and router.localPrefill is never: no worker could prefill; set localPrefill to fallback or auto, or add a replica" }}
{{- end }}
{{- if and (include "baton.apiKeysOn" .) .Values.tests.enabled (not .Values.tests.apiKeySecret.name) }}
{{- fail "apiKeys are on and helm test has none: put a key into a Secret and name it in tests.apiKeySecret.name, or turn tests.enabled off" }}
{{- end }}
{{- if and .Values.apiKeys.existingSecret .Values.apiKeys.entries }}
{{- fail "apiKeys.existingSecret and apiKeys.entries are both set: keep one" }}
{{- end }}
{{- $ports := dict "router.httpPort" $router.httpPort "router.grpcPort" $router.grpcPort "router.metricsPort" $router.metricsPort }}
{{- include "baton.checkPodPorts" (dict "ports" $ports "ranges" dict) }}
{{- end -}}
